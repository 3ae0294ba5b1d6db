from __future__ import annotations

import asyncio

import msgspec

from gyre.proxy.conversation import CallError, CallRequest, Conversation, Message
from gyre.proxy.executions import Execution, Flight

ASKED = CallRequest(conversation=Conversation(messages=(Message(role="user", content=("hi",)),)), model="m")


def begun() -> tuple[Execution, Flight, list[bytes]]:
    execution = Execution("g000001.00", 0, "key")
    digests = execution.index.digests(ASKED.conversation)
    return execution, execution.begin(ASKED, digests), digests


async def test_nothing_in_flight_is_nothing_repeated() -> None:
    execution, flight, digests = begun()
    execution.forget(flight)
    assert await execution.find_repeated(ASKED, digests) is None
    assert execution.flights == []


async def test_what_nobody_waits_for_is_taken_up_once() -> None:
    execution, flight, digests = begun()
    execution.hung_up(flight)
    assert await execution.find_repeated(ASKED, digests) is flight
    assert await execution.find_repeated(ASKED, digests) is None


async def test_a_repetition_heard_before_the_hang_up_is_one_too() -> None:
    execution, flight, digests = begun()
    again = asyncio.create_task(execution.find_repeated(ASKED, digests))
    await asyncio.sleep(0)
    execution.hung_up(flight)
    assert await again is flight


async def test_a_call_that_fails_while_its_repetition_is_looked_for_is_not_taken_up() -> None:
    execution, flight, digests = begun()
    again = asyncio.create_task(execution.find_repeated(ASKED, digests))
    await asyncio.sleep(0)
    execution.forget(flight)
    execution.hung_up(flight)
    assert await again is None


async def test_a_client_that_counts_retries_needs_no_hang_up() -> None:
    execution, flight, digests = begun()
    asked = msgspec.structs.replace(ASKED, is_retry=True)
    assert await execution.find_repeated(asked, digests) is flight
    assert flight.clients == 2


async def test_other_requests_are_not_mixed_up() -> None:
    execution, flight, digests = begun()
    execution.hung_up(flight)
    assert await execution.find_repeated(msgspec.structs.replace(ASKED, max_tokens=3), digests) is None


async def test_a_failure_reaches_whoever_waits_and_disturbs_nobody_else() -> None:
    _, flight, _ = begun()
    flight.fail(CallError(503, "later"))
    flight.fail(CallError(400, "too late"))
    assert str(flight.done.exception()) == "later"
