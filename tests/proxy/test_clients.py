"""The official client against the proxy, and clients that send rubbish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.proxy.house import PUT, PUT_DATA, USER, House, house, openai_client
from tests.proxy.tokenizer_folders import write_tokenizer

PUT_TWICE = PUT_DATA.removesuffix("<|im_end|>") + PUT_DATA.replace("data", "docs")


@pytest.fixture
async def one(chatml_folder: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with house(chatml_folder, tmp_path) as built:
        yield built


@pytest.fixture
async def client(one: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(one.access["g000001.00"]) as opened:
        yield opened


async def test_openai_whole_answer(one: House, client: openai.AsyncOpenAI) -> None:
    one.script.answer = lambda prompt: "I file it. " + PUT_DATA
    answer = await client.chat.completions.create(model="m", messages=[USER], tools=[PUT])
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I file it.", "tool_calls")
    assert choice.message.tool_calls is not None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"folder": "data"}
    assert answer.usage is not None and answer.usage.total_tokens == len(
        one.kept.path(one.kept.records[0].call)
    )


async def test_openai_stream(one: House, client: openai.AsyncOpenAI) -> None:
    one.script.answer = lambda prompt: "I file it. " + PUT_TWICE
    stream = client.chat.completions.stream(
        model="m",
        messages=[USER],
        tools=[PUT],
        stream_options={"include_usage": True},
    )
    async with stream as events:
        answer = await events.get_final_completion()
    message = answer.choices[0].message
    assert message.content == "I file it."
    assert [json.loads(call.function.arguments)["folder"] for call in message.tool_calls or ()] == [
        "data",
        "docs",
    ]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(one.kept.records[0].new_input_ids)


async def test_openai_conversation_goes_on(one: House, client: openai.AsyncOpenAI) -> None:
    one.script.answer = lambda prompt: PUT_DATA if prompt.count("assistant") == 1 else "done<|im_end|>"
    messages: list[Any] = [USER]
    first = await client.chat.completions.create(model="m", messages=messages, tools=[PUT])
    messages.append(first.choices[0].message)
    for call in first.choices[0].message.tool_calls or ():
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "next: box"})
    await client.chat.completions.create(model="m", messages=messages, tools=[PUT])
    assert one.kept.records[1].parent == one.kept.records[0].call


async def test_openai_errors_have_their_types(one: House, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=[USER] * 200)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="no").models.list()
    assert [model.id async for model in client.models.list()] == ["gyre-policy"]


async def test_openai_retries_a_503(one: House, client: openai.AsyncOpenAI) -> None:
    one.kept.full = True
    patient = client.with_options(max_retries=3)
    call = asyncio.create_task(patient.chat.completions.create(model="m", messages=[USER]))
    await one.until(failed_calls=1)
    one.kept.full = False
    assert (await call).choices[0].message.content == "hello"


async def test_openai_responses_errors_have_their_types(one: House, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="m", input=[USER] * 200)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="no response is kept here; send the whole input"):
        await client.responses.create(model="m", input="hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")


async def test_openai_responses_stream_fails_after_it_waited(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, keep_alive_s=0.01) as one:
        one.kept.full = True
        one.script.pause_at = 1
        async with openai_client(one.access["g000001.00"]) as client:
            opened = await client.responses.create(model="m", input="hi", stream=True)
            one.script.go.set()
            created, *_, failed = [event async for event in opened]
    assert created.type == "response.created"
    assert failed.type == "response.failed" and failed.response.error is not None
    assert "could not be recorded" in failed.response.error.message


async def test_openai_counts_what_a_call_will_have(one: House, client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "m", "input": "hi", "instructions": "Be short."}
    counted = await client.responses.input_tokens.count(**asked)
    answer = await client.responses.create(**asked)
    assert answer.usage is not None and answer.usage.input_tokens == counted.input_tokens
    assert len(one.kept.records) == 1


async def test_a_client_that_reads_half_a_stream_gets_the_same_again(tmp_path: Path) -> None:
    # Larger than what sockets buffer, so that the end cannot have left.
    word = "w" * 1_000_000
    folder = write_tokenizer(tmp_path / "long")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([word])
    tokenizer.save(str(folder / "tokenizer.json"))
    async with house(folder, tmp_path) as built:
        (token,) = tokenizer.encode(word).ids
        built.script.answer = lambda prompt: [token] * 10
        access = built.access["g000001.00"]
        url, headers = f"{access.base_url}/chat/completions", {"Authorization": f"Bearer {access.key}"}
        body = {"messages": [USER], "stream": True}
        async with built.http.post(url, json=body, headers=headers) as response:
            assert b"w" in await response.content.readany() + await response.content.readany()
            response.close()
        _, answer = await built.post(body | {"stream": False})
        assert answer["choices"][0]["message"]["content"] == word * 10
        assert len(built.kept.records) == 1
        assert (await built.totals()).retries == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"{post}Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"{post}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"{post}Content-Length: -4\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
async def test_broken_http_is_answered_with_a_4xx(one: House, request_bytes: bytes) -> None:
    access = one.access["g000001.00"]
    host, port = access.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {access.key}\r\n"
    writer.write(request_bytes.replace(b"{post}", head.encode()))
    status_line = await reader.readline()
    assert status_line.split()[1].startswith(b"4"), status_line
    writer.close()
    await writer.wait_closed()
    assert (await one.post({"messages": [USER]}))[0] == 200
