"""Streams of calls in flight: words leave as they are sampled, whatever becomes of engines and clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre.actors import Actor, ChildSpec, handles
from gyre.cell.engine.base import Chunk
from gyre.cell.messages import Generate
from gyre.proxy import CloseExecution
from gyre.proxy.api_chat import _Chunks
from gyre.proxy.messages_output import MessageEvents
from gyre.proxy.responses_output import OutputEvents
from gyre.trajectory.records import UNFINISHED
from tests.proxy.house import PUT, PUT_DATA, USER, House, house
from tests.proxy.talkers import talking

APIS = ("chat", "messages", "responses")
STREAMS: dict[str, type] = {"chat": _Chunks, "messages": MessageEvents, "responses": OutputEvents}
ANSWER = "<think>Where to?</think>I file it, 日本 and all."
TEXT = ANSWER.partition("</think>")[2]
LAST = {"chat": b"data: [DONE]", "messages": b"message_stop", "responses": b"response.completed"}


@pytest.fixture
async def one(chatml_folder: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with house(chatml_folder, tmp_path, cells=2, keep_alive_s=60.0) as built:
        built.script.answer = lambda prompt: ANSWER + "<|im_end|>"
        yield built


def call_of(api: str, stream: bool = True) -> tuple[str, dict[str, Any]]:
    """Path and body."""
    messages = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
    if api == "responses":
        return "/responses", {"model": "m", "input": "hi", "stream": stream}
    return {"chat": "/chat/completions", "messages": "/messages"}[api], messages | {"stream": stream}


@asynccontextmanager
async def opened(one: House, api: str, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    access = one.access["g000001.00"]
    path, body = call_of(api)
    sent = {"Authorization": f"Bearer {access.key}"} | headers
    async with one.http.post(access.base_url + path, json=body, headers=sent) as response:
        assert response.status == 200
        yield response


def said(stream: bytes) -> str:
    """Its text, of all events that have come whole."""
    lines = stream.decode(errors="ignore").rpartition("\n\n")[0].split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event.get("choices")]
    texts = [delta["content"] for delta in deltas if "content" in delta]
    typed = [event for event in events if "type" in event]
    texts += [event["delta"].get("text", "") for event in typed if event["type"] == "content_block_delta"]
    texts += [event["delta"] for event in typed if event["type"] == "response.output_text.delta"]
    return "".join(texts)


async def read_until(response: aiohttp.ClientResponse, text: str) -> bytes:
    stream = b""
    while said(stream) != text:
        chunk = await response.content.readany()
        assert chunk, stream
        stream += chunk
    return stream


def pause_after(one: House, text: str) -> None:
    """The engine waits once it has sampled so much of the answer."""
    ids = one.script.tokenizer.encode(ANSWER).ids
    one.script.pause_at = next(n for n in range(len(ids)) if one.script.text(ids[:n]).endswith(text))


@pytest.mark.parametrize("api", APIS)
async def test_words_leave_before_the_answer_is_complete(one: House, api: str) -> None:
    pause_after(one, "I file it,")
    async with opened(one, api) as response:
        begun = await read_until(response, "I file it,")
        assert not one.kept.records and not one.script.go.is_set()
        one.script.go.set()
        stream = begun + await response.read()
    assert said(stream) == TEXT
    assert LAST[api] in stream


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("api", APIS)
async def test_a_stream_goes_on_where_another_engine_does(one: House, api: str, lost: bool) -> None:
    pause_after(one, "I file it,")
    async with opened(one, api) as response:
        begun = await read_until(response, "I file it,")
        (first,) = one.script.engines_used()
        one.script.pause_at = None
        await one.close_cell(int(first.removeprefix("cell")), lost=lost)
        stream = begun + await response.read()
    assert len(one.script.engines_used()) == 2
    assert said(stream) == TEXT
    assert LAST[api] in stream
    (record,) = one.kept.records
    assert record.reroutes == 1 and (await one.totals()).failed_calls == 0


@pytest.mark.parametrize("api", APIS)
async def test_the_end_of_a_stream_waits_for_the_journal(one: House, api: str) -> None:
    one.kept.durable.clear()
    async with opened(one, api) as response:
        begun = await read_until(response, TEXT)
        await one.kept.asked.wait()
        rest = asyncio.create_task(response.read())
        assert not (await asyncio.wait([rest], timeout=0.05))[0]
        assert LAST[api] not in begun
        one.kept.durable.set()
        assert LAST[api] in await rest


@pytest.mark.parametrize("api", APIS)
async def test_who_asks_again_in_mid_stream_hears_the_same_from_its_beginning(one: House, api: str) -> None:
    pause_after(one, "I file it,")
    async with opened(one, api) as response:
        await read_until(response, "I file it,")
        response.close()
    # It says so, because the proxy may hear that the first is gone after it hears this one.
    async with opened(one, api, **{"x-stainless-retry-count": "1"}) as response:
        begun = await read_until(response, "I file it,")
        one.script.go.set()
        assert said(begun + await response.read()) == TEXT
    assert len(one.kept.records) == 1
    assert (await one.until(retries=1)).calls == 1


@pytest.mark.parametrize("api", APIS)
async def test_an_execution_that_ends_in_mid_stream_ends_it_with_an_error(one: House, api: str) -> None:
    pause_after(one, "I file it,")
    async with opened(one, api) as response:
        begun = await read_until(response, "I file it,")
        await one.proxy.ask(CloseExecution(execution="g000001.00"))
        end = await response.read()
    assert b"this execution has ended" in end and LAST[api] not in end
    assert said(begun + end) == "I file it,"
    (record,) = one.kept.records
    assert record.finish_reason == UNFINISHED
    assert one.script.text(record.output_ids).endswith("I file it,")


@pytest.mark.parametrize("api", APIS)
async def test_a_fault_in_mid_stream_is_an_error_event_and_no_second_answer(
    one: House, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: Any, completion: Any) -> Any:
        raise ArithmeticError("a planted fault")

    monkeypatch.setattr(STREAMS[api], "end", end)
    async with opened(one, api) as response:
        stream = await response.read()
    assert said(stream) == TEXT
    assert b"HTTP/1.1" not in stream
    assert "a planted fault" in json.dumps(json.loads(stream.split(b"data: ")[-1]))
    monkeypatch.undo()
    # Its answer has reached nobody.
    async with opened(one, api) as response:
        assert LAST[api] in await response.read()
    assert len(one.kept.records) == 1
    assert (await one.totals()).failed_calls == 1


class Trickling(Actor):
    """Samples its ids, each after a while."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        for token in self._ids:
            await asyncio.sleep(0.005)
            end = "stop" if token == self._ids[-1] else None
            yield Chunk(token_ids=(token,), logprobs=(-0.5,), versions=(0,), finish_reason=end)


async def test_a_stream_is_kept_alive_while_a_tool_call_is_sampled(
    chatml_folder: Path, tmp_path: Path
) -> None:
    async with house(chatml_folder, tmp_path, cells=0, keep_alive_s=0.05) as built:
        ids = built.script.tokenizer.encode("I file it." + PUT_DATA).ids
        spec = ChildSpec(name="engine", start=lambda: Trickling(ids), restart="temporary")
        built.engines[0] = await built.node.spawn(spec)
        await built.open_cell(0)
        status, text = await built.post({"messages": [USER], "tools": [PUT], "stream": True})
    assert status == 200
    before, _, call = text.partition('"tool_calls":[')
    assert call and ": waiting\n\n" in before


@pytest.mark.parametrize("api", APIS)
async def test_the_vendors_clients_hear_the_same_streamed_and_whole(one: House, api: str) -> None:
    heard = []
    for stream in (True, False):
        await one.open("g000001.00")
        async with talking(api, one.access["g000001.00"]) as talker:
            heard.append(await talker.say("hi", stream))
    assert heard[0] == heard[1]
    assert (heard[0].text, heard[0].reasoning) == (TEXT, "Where to?")


async def test_a_stream_to_qwen_code_that_breaks_just_ends(one: House) -> None:
    pause_after(one, "I file it,")
    async with opened(one, "chat", **{"User-Agent": "QwenCode/0.15.10 (linux; x64)"}) as response:
        assert response.headers["Connection"] == "close"
        assert not {"Transfer-Encoding", "Content-Length"} & {*response.headers}
        begun = await read_until(response, "I file it,")
        one.script.go.set()
        assert LAST["chat"] in begun + await response.read()
