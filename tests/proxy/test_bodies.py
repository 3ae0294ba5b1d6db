"""Bodies that harnesses send, and mutations of them: a correct answer or a 4xx in the API's own shape.
GYRE_TEST_BODIES says how many mutations of each API; `make test-bodies` sends 100,000."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.proxy.bodies import BODIES, encoded
from tests.proxy.house import House, house

MUTATIONS = int(os.environ.get("GYRE_TEST_BODIES", "160"))
# So many a batch share an execution, whose calls are kept as long as it is open.
BATCH = 16
EXECUTION = "g000001.00"
TYPES = sorted(
    {
        *("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document"),
        *(
            "message",
            "reasoning",
            "function_call",
            "function_call_output",
            "item_reference",
            "web_search_call",
        ),
        *("input_text", "output_text", "summary_text", "input_image", "refusal", "image_url"),
        *(
            "function",
            "custom",
            "namespace",
            "web_search",
            "user",
            "assistant",
            "system",
            "developer",
            "tool",
        ),
    }
)


def mutated(random: Random, bodies: list[Any]) -> bytes:
    """A body with one to three changes: of its bytes, or of what stands in it."""
    if random.random() < 0.3:
        changed = bytearray(encoded(random.choice(bodies)))
        for _ in range(random.randint(1, 3)):
            at = random.randint(0, len(changed))
            changed[at : at + random.randint(0, 8)] = random.randbytes(random.randint(0, 4))
        return bytes(changed)
    body = copy.deepcopy(random.choice(bodies))
    for _ in range(random.randint(1, 3)):
        change(random, body)
    # Deeper than what writes it can go.
    return re.sub(rb'"deep (\d+)"', lambda deep: b"[" * int(deep[1]) + b"]" * int(deep[1]), encoded(body))


def change(random: Random, body: Any) -> None:
    """Something else at some place."""
    place: Any = body
    while keys := list(place) if isinstance(place, dict) else list(range(len(place))):
        key = random.choice(keys)
        if isinstance(place[key], (dict, list)) and random.random() < 0.75:
            place = place[key]
            continue
        how = random.choice(["put", "put", "type", "cut", "twice", "wrap", "deep"])
        if how == "put":
            place[key] = any_value(random, 3)
        elif how == "type":
            place[key] = random.choice(TYPES)
        elif how == "cut":
            del place[key]
        elif how == "twice" and isinstance(place, list):
            place.insert(random.randint(0, len(place)), copy.deepcopy(place[key]))
        else:
            place[key] = [place[key]] if how == "wrap" else f"deep {random.randint(1, 2000)}"
        return


def any_value(random: Random, depth: int) -> Any:
    kind = random.randrange(9 if depth else 7)
    if kind == 7:
        return [any_value(random, depth - 1) for _ in range(random.randint(0, 3))]
    if kind == 8:
        return {any_text(random): any_value(random, depth - 1) for _ in range(random.randint(0, 3))}
    whole = random.choice([0, 1, -1, 2**31, 2**63, 2**64, 10**30])
    return [None, True, False, whole, random.uniform(-10, 10), 1e300, any_text(random)][kind]


def any_text(random: Random) -> str:
    """Lone surrogates too, which JSON can escape and no text holds."""
    return "".join(
        chr(random.choice([0, 32, 65, 255, 0x4E2D, 0xD800, 0x1F600])) for _ in range(random.randint(0, 4))
    )


async def send(one: House, path: str, body: bytes) -> tuple[int, Any]:
    """The status, and the JSON or the events of the answer."""
    access = one.access[EXECUTION]
    url = access.base_url.removesuffix("/v1") + path
    headers = {"x-api-key": access.key, "Content-Type": "application/json"}
    async with one.http.post(f"{url}?beta=true", data=body, headers=headers) as response:
        if response.content_type == "application/json":
            return response.status, await response.json()
        return response.status, await response.text()


def check_error(api: str, status: int, answer: Any, body: bytes) -> None:
    assert 400 <= status < 500, (body, answer)
    error = answer["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    if api in ("messages", "count_tokens"):
        assert answer["type"] == "error"
    else:
        assert set(error) == {"message", "type", "param", "code"}


def text_of(api: str, answer: Any) -> str:
    """What a whole or a streamed answer says, which must be complete."""
    if isinstance(answer, str):
        return text_of_events(api, answer)
    if api == "chat":
        text: str = answer["choices"][0]["message"]["content"]
    elif api == "messages":
        text = "".join(block["text"] for block in answer["content"])
    else:
        text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    return text


def text_of_events(api: str, stream: str) -> str:
    *events, last = [event.split("data: ", 1)[1] for event in stream.strip().split("\n\n")]
    if api == "chat":
        assert last == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content", "") for choice in choices)
    kinds = [json.loads(event) for event in events]
    if api == "messages":
        assert json.loads(last)["type"] == "message_stop"
        return "".join(
            kind["delta"].get("text", "") for kind in kinds if kind["type"] == "content_block_delta"
        )
    assert json.loads(last)["type"] in ("response.completed", "response.incomplete")
    return "".join(kind["delta"] for kind in kinds if kind["type"] == "response.output_text.delta")


async def check(one: House, api: str, body: bytes) -> None:
    calls = len(one.kept.records)
    status, answer = await send(one, BODIES[api][0], body)
    if status != 200:
        check_error(api, status, answer, body)
        assert len(one.kept.records) == calls
    elif api in ("count_tokens", "input_tokens"):
        assert answer["input_tokens"] > 0
    else:
        text = text_of(api, answer)
        assert text == "hello"[: len(text)] and text
        assert len(one.kept.records) == calls + 1


async def check_batch(one: House, api: str, bodies: list[bytes]) -> None:
    one.kept.records.clear()
    one.script.requests.clear()
    await one.open(EXECUTION)
    for body in bodies:
        await check(one, api, body)


@pytest.mark.parametrize("api", list(BODIES))
async def test_what_harnesses_send_is_answered(chatml_folder: Path, tmp_path: Path, api: str) -> None:
    async with house(chatml_folder, tmp_path, window_tokens=8192) as one:
        for body in BODIES[api][1]:
            status, answer = await send(one, BODIES[api][0], encoded(body))
            assert status == 200, answer
            await check(one, api, encoded(body))


@pytest.mark.timeout(60 + MUTATIONS // 20)
@pytest.mark.parametrize("api", list(BODIES))
async def test_no_mutated_body_makes_a_500(chatml_folder: Path, tmp_path: Path, api: str) -> None:
    loop = asyncio.get_running_loop()

    @settings(
        max_examples=MUTATIONS // BATCH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**64 - 1))
    def mutate(seed: int) -> None:
        random = Random(seed)
        batch = [mutated(random, BODIES[api][1]) for _ in range(BATCH)]
        asyncio.run_coroutine_threadsafe(check_batch(one, api, batch), loop).result()

    async with house(chatml_folder, tmp_path, window_tokens=8192) as one:
        await asyncio.to_thread(mutate)
        assert (await one.totals()).failed_calls == 0
