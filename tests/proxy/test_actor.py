"""The proxy over real sockets, against scripted engines."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre.actors import ChildSpec, Node
from gyre.actors.errors import SpawnFailed
from gyre.cell.engine.base import SamplingParams
from gyre.proxy import CloseExecution, ProxyConfig
from gyre.proxy.actor import ProxyActor, ProxyActorConfig
from tests.proxy.house import PUT, PUT_DATA, USER, House, house
from tests.proxy.scripted import KeepingTrajectory, Kept

CHAT = {"messages": [USER]}


@pytest.fixture
async def one(chatml_folder: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with house(chatml_folder, tmp_path) as built:
        yield built


async def test_a_call_is_answered_and_recorded(one: House) -> None:
    status, answer = await one.post(CHAT)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    (record,) = one.kept.records
    assert one.script.text(record.new_input_ids) == (
        "<|im_start|>user\nnext: k7.csv<|im_end|>\n<|im_start|>assistant\n"
    )
    assert one.script.text(record.output_ids) == "hello<|im_end|>"
    assert record.logprobs == tuple(-n - 0.5 for n in range(len(record.output_ids)))
    assert record.versions == (0,) * len(record.output_ids)
    assert (record.execution, record.call, record.parent) == ("g000001.00", "g000001.00-0-0000", None)
    assert record.messages == (USER,)
    assert record.output_message == {"role": "assistant", "content": "hello"}
    assert answer["usage"]["prompt_tokens"] == len(record.new_input_ids)
    assert answer["usage"]["completion_tokens"] == len(record.output_ids)


async def test_a_conversation_is_one_path_of_what_was_sent_and_sampled(one: House) -> None:
    one.script.answer = lambda prompt: PUT_DATA if prompt.count("assistant") < 3 else "done<|im_end|>"
    messages: list[Any] = [{"role": "system", "content": "You tidy an inbox."}, USER]
    for _ in range(3):
        answer = await one.chat(*messages, tools=[PUT])
        messages.append(answer)
        for call in answer.get("tool_calls", ()):
            # As harnesses do: arguments written anew.
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "next: box"})
    records = one.kept.records
    assert [record.parent for record in records] == [None, *(record.call for record in records[:2])]
    assert messages[-1]["content"] == "done"
    for record, (_, request) in zip(records, one.script.requests, strict=True):
        assert one.kept.path(record.call) == [*request.prompt_ids, *record.output_ids]
    assert records[1].messages == (messages[3],)
    assert list(records[0].tool_calls.values()) == [PUT_DATA.removesuffix("<|im_end|>")]
    assert one.script.text(one.kept.path(records[0].call)).endswith(PUT_DATA)


async def test_the_answer_waits_for_the_journal(one: House) -> None:
    one.kept.durable.clear()
    call = asyncio.create_task(one.post(CHAT | {"stream": True}))
    await one.kept.asked.wait()
    assert not (await asyncio.wait([call], timeout=0.05))[0]
    one.kept.durable.set()
    assert (await call)[0] == 200


async def test_a_record_that_is_not_durable_fails_the_call(one: House) -> None:
    one.kept.full = True
    status, answer = await one.post(CHAT)
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert "disk is full" in answer["error"]["message"]
    one.kept.full = False
    assert (await one.post(CHAT))[0] == 200
    assert (await one.totals()).failed_calls == 1


async def test_a_length_limit_is_told_and_the_turn_goes_on(one: House) -> None:
    _, answer = await one.post(CHAT | {"max_tokens": 1})
    assert answer["choices"][0]["finish_reason"] == "length"
    one.script.answer = lambda prompt: "again<|im_end|>"
    await one.chat(USER, answer["choices"][0]["message"], USER)
    first, second = one.kept.records
    assert second.parent == first.call
    assert one.script.text(second.new_input_ids).startswith("<|im_end|>\n<|im_start|>user")


async def test_limits_are_the_jobs_and_the_windows(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, max_new_tokens=50, window_tokens=40) as built:
        await built.chat(USER, max_tokens=8000, temperature=0, top_p=0.1)
        (_, request) = built.script.requests[0]
        assert request.sampling.max_new_tokens == 40 - request.prompt_tokens
        assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)
        assert request.session == "g000001.00"
        long = {"role": "user", "content": "x y " * 40}
        status, answer = await built.post({"messages": [long]})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["message"].startswith("prompt is too long: ")
        assert answer["error"]["message"].endswith(" tokens > 40 maximum")


async def test_draws_differ_between_executions_and_repetitions(one: House) -> None:
    await one.open("g000001.01")
    for execution in ("g000001.00", "g000001.01", "g000001.00"):
        await one.chat(USER, execution=execution)
    seeds = [request.sampling.seed for _, request in one.script.requests]
    assert len(set(seeds)) == 3
    await one.open("g000001.00", attempt=1)
    await one.chat(USER)
    assert one.script.requests[-1][1].sampling.seed == seeds[0]
    assert one.kept.records[-1].call == "g000001.00-1-0000"


async def test_a_refill_draws_what_was_not_drawn_before_in_each_attempt(one: House) -> None:
    seeds = []
    for attempt, refill in enumerate([0, 1, 1, 2]):
        await one.open("g000001.00", attempt=attempt, refill=refill)
        await one.chat(USER)
        seeds.append(one.script.requests[-1][1].sampling.seed)
    assert seeds[1] == seeds[2]
    assert len(set(seeds)) == 3


async def test_sub_agents_and_compaction_fork_and_root(one: House) -> None:
    one.script.answer = lambda prompt: f"answer {prompt.count('user')}<|im_end|>"
    first = await one.chat(USER)
    subs = [{"role": "user", "content": f"sub {n}"} for n in range(4)]
    await asyncio.gather(*(one.chat(sub) for sub in subs))
    branches = [{"role": "user", "content": f"branch {n}"} for n in range(4)]
    await asyncio.gather(*(one.chat(USER, first, branch) for branch in branches))
    await one.chat({"role": "user", "content": "The session so far: answer"}, first, USER)
    parents = [record.parent for record in one.kept.records]
    root = one.kept.records[0].call
    assert parents == [None] * 5 + [root] * 4 + [None]
    for record in one.kept.records:
        (request,) = [request for _, request in one.script.requests if request.call == record.call]
        assert one.kept.path(record.call) == [*request.prompt_ids, *record.output_ids]


async def test_one_execution_sees_nothing_of_another(one: House) -> None:
    await one.open("g000001.01")
    one.script.answer = lambda prompt: PUT_DATA
    answer = await one.chat(USER, tools=[PUT])
    await one.chat(USER, answer, USER, execution="g000001.01", tools=[PUT])
    assert one.kept.records[1].parent is None


async def test_a_closed_executions_key_is_dead(one: House) -> None:
    await one.proxy.ask(CloseExecution(execution="g000001.00"))
    status, answer = await one.post(CHAT)
    assert (status, answer["error"]["code"]) == (400, "execution_closed")


async def test_what_is_in_flight_when_an_execution_is_closed_is_recorded_as_unfinished(one: House) -> None:
    one.script.pause_at = 3
    call = asyncio.create_task(one.post(CHAT))
    await one.script.paused.wait()
    await one.proxy.ask(CloseExecution(execution="g000001.00"))
    (record,) = one.kept.records
    assert (record.call, record.finish_reason) == ("g000001.00-0-0000", "unfinished")
    assert 0 < len(record.logprobs) == len(record.versions) == len(record.output_ids)
    assert "hel".startswith(one.script.text(record.output_ids))
    status, answer = await call
    assert (status, answer["error"]["code"]) == (400, "execution_closed")
    await one.until(in_flight=0)
    assert one.kept.records == [record]


async def test_what_was_sampled_of_a_call_that_fails_is_recorded_as_unfinished(
    chatml_folder: Path, tmp_path: Path
) -> None:
    async with house(chatml_folder, tmp_path, wait_s=0.1) as built:
        built.script.failing = {"cell0"}
        assert (await built.post(CHAT))[0] == 503
        assert [record.finish_reason for record in built.kept.records] == ["unfinished"]
        built.script.failing = set()
        await built.chat(USER)
        assert [record.parent for record in built.kept.records] == [None, None]
        assert [record.finish_reason for record in built.kept.records] == ["unfinished", "stop"]


async def test_a_new_attempt_ends_the_old_one(one: House) -> None:
    old = one.access["g000001.00"]
    await one.open(attempt=1)
    one.access["old"] = old
    assert (await one.post(CHAT, "old"))[0] == 400
    assert (await one.post(CHAT))[0] == 200


async def test_an_unknown_key_is_a_401(one: House) -> None:
    for headers in ({"Authorization": "Bearer no"}, {"Authorization": ""}, {"x-api-key": "no"}):
        status, answer = await one.post(CHAT, headers={"Authorization": ""} | headers)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")


async def test_the_key_may_come_in_either_header(one: House) -> None:
    key = one.access["g000001.00"].key
    assert (await one.post(CHAT, headers={"Authorization": "", "x-api-key": key}))[0] == 200


async def test_models_and_health(one: House) -> None:
    base = one.access["g000001.00"].base_url
    headers = {"Authorization": f"Bearer {one.access['g000001.00'].key}"}
    async with one.http.get(f"{base}/models", headers=headers) as response:
        assert (await response.json())["data"][0]["id"] == "gyre-policy"
    async with one.http.get(f"{base}/models") as response:
        assert response.status == 401
    async with one.http.get(base.replace("/v1", "/healthz")) as response:
        assert await response.json() == {"status": "ok"}


async def test_an_unknown_path_is_a_404_in_the_apis_shape(one: House) -> None:
    base = one.access["g000001.00"].base_url
    async with one.http.post(f"{base}/nowhere") as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "not_found_error"


async def test_a_body_over_the_limit_is_a_413(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, max_body_bytes=1000) as built:
        status, answer = await built.post({"messages": [{"role": "user", "content": "x" * 2000}]})
        assert status == 413
        assert "harness.proxy.max_body_bytes" in answer["error"]["message"]


async def test_tools_are_refused_by_a_policy_without(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, tool_format="plain") as built:
        status, answer = await built.post(CHAT | {"tools": [PUT]})
        assert status == 400
        assert "harness.proxy.tool_format" in answer["error"]["message"]


async def test_the_unix_socket_serves_the_same(one: House) -> None:
    access = one.access["g000001.00"]
    assert access.unix_socket == one.unix_socket
    connector = aiohttp.UnixConnector(path=str(access.unix_socket))
    async with aiohttp.ClientSession(connector=connector) as http:
        headers = {"Authorization": f"Bearer {access.key}"}
        async with http.post("http://proxy/v1/chat/completions", json=CHAT, headers=headers) as response:
            assert response.status == 200


async def test_a_waiting_stream_is_kept_alive(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, keep_alive_s=0.01) as built:
        built.script.pause_at = 0
        call = asyncio.create_task(built.post(CHAT | {"stream": True}))
        await built.script.paused.wait()
        await asyncio.wait([call], timeout=0.1)
        built.script.go.set()
        status, text = await call
        assert status == 200
        assert text.startswith(": waiting\n\n")
        assert text.endswith("data: [DONE]\n\n")


async def test_a_stream_that_waited_in_vain_ends_with_an_error(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, cells=0, keep_alive_s=0.01, wait_s=0.1) as built:
        status, text = await built.post(CHAT | {"stream": True})
        assert status == 200
        assert '"code":"unavailable"' in text.split("\n\n")[-2]


async def test_a_slow_client_blocks_nobody(one: House) -> None:
    access = one.access["g000001.00"]
    host, port = access.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {access.key}\r\n"
    writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert (await one.post(CHAT))[0] == 200
    writer.close()
    await writer.wait_closed()


async def test_a_port_in_use_is_named(chatml_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = ProxyActorConfig(
            proxy=ProxyConfig(port=taken.getsockname()[1]),
            tokenizer=chatml_folder,
            sampling=SamplingParams(),
            window_tokens=64,
            model_name="m",
        )
        async with Node(name="test") as node:
            trajectory = await node.spawn(
                ChildSpec(name="trajectory", start=lambda: KeepingTrajectory(Kept()))
            )
            with pytest.raises(SpawnFailed, match=r"port is in use; set harness\.proxy\.port"):
                await node.spawn(ChildSpec(name="proxy", start=lambda: ProxyActor(config, trajectory)))


async def test_the_port_is_free_after_the_end(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path) as built:
        port = int(built.access["g000001.00"].base_url.split(":")[2].split("/")[0])
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
    assert not (tmp_path / "proxy.sock").exists()
