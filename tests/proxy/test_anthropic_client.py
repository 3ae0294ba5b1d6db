"""Anthropic's own client against the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.proxy.house import House, house
from tests.proxy.talkers import anthropic_client

HI: Any = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "next: k7.csv"}]}


@pytest.fixture
async def one(chatml_folder: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with house(chatml_folder, tmp_path, keep_alive_s=0.01) as built:
        yield built


@pytest.fixture
async def client(one: House) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_client(one.access["g000001.00"]) as opened:
        yield opened


async def test_errors_have_their_types(one: House, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1024 maximum"):
        await client.messages.create(**HI | {"messages": HI["messages"] * 200})
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        await client.with_options(api_key="no").messages.create(**HI)
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await client.messages.batches.list()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match=r"'image' is not supported; send text"):
        await client.messages.create(**HI | {"messages": [{"role": "user", "content": [image]}]})


async def test_a_503_is_tried_again(one: House, client: anthropic.AsyncAnthropic) -> None:
    one.kept.full = True
    call = asyncio.create_task(client.with_options(max_retries=3).messages.create(**HI))
    await one.until(failed_calls=1)
    one.kept.full = False
    assert (await call).content[0].text == "hello"


async def test_a_stream_pings_while_it_waits(one: House, client: anthropic.AsyncAnthropic) -> None:
    one.script.pause_at = 0
    async with client.messages.with_streaming_response.create(**HI, stream=True) as response:
        lines = response.iter_lines()
        assert [await anext(lines), await anext(lines)] == ["event: ping", 'data: {"type":"ping"}']
        one.script.go.set()
        kinds = [line async for line in lines if line.startswith("event: ") and "ping" not in line]
    assert (kinds[0], kinds[-1]) == ("event: message_start", "event: message_stop")


async def test_pings_are_no_part_of_an_answer(one: House, client: anthropic.AsyncAnthropic) -> None:
    one.script.pause_at = 1
    async with client.messages.stream(**HI) as stream:
        one.script.go.set()
        assert await stream.get_final_text() == "hello"


async def test_a_stream_that_waited_ends_with_its_error(one: House, client: anthropic.AsyncAnthropic) -> None:
    one.kept.full = True
    one.script.pause_at = 1
    async with client.messages.stream(**HI) as stream:
        one.script.go.set()
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            await stream.get_final_message()


async def test_tokens_are_counted_without_a_call(one: House, client: anthropic.AsyncAnthropic) -> None:
    asked = {name: value for name, value in HI.items() if name != "max_tokens"}
    counted = await client.messages.count_tokens(**asked, system="You tidy.")
    assert (one.script.requests, one.kept.records) == ([], [])
    answer = await client.messages.create(**HI, system="You tidy.")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    goes_on = [*HI["messages"], {"role": "assistant", "content": answer.content}, *HI["messages"]]
    longer = await client.messages.count_tokens(model="m", messages=goes_on, system="You tidy.")
    await client.messages.create(**HI | {"messages": goes_on}, system="You tidy.")
    assert longer.input_tokens == len(one.script.requests[-1][1].prompt_ids)


async def test_models_are_listed_in_anthropics_form(one: House, client: anthropic.AsyncAnthropic) -> None:
    assert [(model.id, model.type) async for model in client.models.list()] == [("gyre-policy", "model")]
    assert (await client.models.retrieve("claude-x")).id == "claude-x"


async def test_the_fallback_without_a_stream_gets_the_sample_that_the_stream_did_not_bring(
    one: House,
) -> None:
    """Claude Code asks so once a stream has ended early: the same body minus `stream`."""
    access = one.access["g000001.00"]
    url = access.base_url + "/messages?beta=true"
    headers = {"x-api-key": access.key, "anthropic-beta": "unknown-2030-01-01"}
    one.script.pause_at = 1
    async with one.http.post(url, json=HI | {"stream": True}, headers=headers) as response:
        await response.content.readline()
        response.close()
    one.script.go.set()
    async with one.http.post(url, json=HI, headers=headers) as response:
        answer = await response.json()
    assert answer["content"] == [{"type": "text", "text": "hello"}]
    assert len(one.kept.records) == 1 and (await one.totals()).retries == 1
