"""Calls that leave their cell, and harnesses that hang up: nobody notices, nothing is sampled twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gyre.actors import ChildSpec, ProcessSpec
from gyre.cell.engine.base import ContextOverflow
from gyre.proxy.messages import CloseExecution
from gyre.schedule.messages import CloseRoute, WatchCalls
from tests.proxy.house import PUT, PUT_DATA, USER, House, house
from tests.proxy.process_engine import CountingConfig, GetPid
from tests.proxy.scripted import Die, Mourner

CHAT = {"messages": [USER], "tools": [PUT]}


@pytest.fixture
async def two(chatml_folder: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with house(chatml_folder, tmp_path, cells=2, wait_s=5.0) as built:
        built.script.answer = lambda prompt: "I file it. " + PUT_DATA
        yield built


def stable(answer: Any) -> Any:
    """An answer without what differs between any two calls."""
    return {key: value for key, value in answer.items() if key not in ("id", "created")} | {
        "choices": str(answer["choices"]).replace("-0001", "-0000").replace("-0002", "-0000")
    }


async def undisturbed(two: House) -> tuple[Any, list[int]]:
    _, answer = await two.post(CHAT)
    return stable(answer), list(two.kept.records[-1].output_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_role_change_changes_no_byte(two: House, stream: bool) -> None:
    before, ids = await undisturbed(two)
    two.script.pause_at = 3
    call = asyncio.create_task(two.post(CHAT | {"stream": stream}))
    await two.script.paused.wait()
    source = two.script.engines_used()[-1]
    two.script.pause_at = None
    assert await two.close_cell(int(source[-1])) == 1
    status, answer = await call
    assert status == 200
    record = two.kept.records[-1]
    assert list(record.output_ids) == ids
    assert record.logprobs == two.kept.records[0].logprobs
    assert record.reroutes == 1
    assert two.script.engines_used()[-1] != source
    resumed = two.script.requests[-1][1]
    assert resumed.prompt_ids[resumed.prompt_tokens :] == record.output_ids[:3]
    assert resumed.sampling.max_new_tokens == 64
    assert resumed.sampling.seed == two.script.requests[-2][1].sampling.seed
    if not stream:
        assert stable(answer) == before
    assert (await two.totals()).failed_calls == 0


async def test_a_call_can_be_followed_through_a_role_change_by_its_ids(two: House) -> None:
    two.script.pause_at = 3
    call = asyncio.create_task(two.post(CHAT))
    await two.script.paused.wait()
    source = int(two.script.engines_used()[-1][-1])
    two.script.pause_at = None
    with capture_logs() as logs:
        closed = await two.proxy.ask(CloseRoute(cell=source, change="r000007"))
        await call
    assert (closed.calls, closed.recomputed) == (1, 1)
    states = ["stop_admitting", "pin", "cancel", "migrate", "hand_over", "migrate_idle"]
    assert list(closed.states_s) == states
    told = [entry for entry in logs if entry.get("change") == "r000007"]
    assert [entry["state"] for entry in told if entry["event"] == "role_change_state"] == states
    events = {entry["event"]: entry for entry in told}
    moved = events["call_moved"]
    assert (moved["execution"], moved["call"]) == ("g000001.00", two.kept.records[-1].call)
    assert (moved["cell"], moved["to_cell"], moved["tokens"]) == (source, 1 - source, 3)
    assert events["route_closed"]["calls_moved"] == 1


async def test_only_engines_that_had_its_calls_are_asked_at_an_executions_end(two: House) -> None:
    """One that hangs holds up nobody else's."""
    await two.post(CHAT)
    await two.proxy.ask(CloseExecution(execution="g000001.00"))
    assert two.script.ended == ["g000001.00"]


async def test_who_watches_learns_how_many_calls_are_in_flight(two: House) -> None:
    two.script.pause_at = 1
    async with aclosing(two.proxy.stream(WatchCalls())) as watched:
        assert (await anext(watched)).calls == 0
        call = asyncio.create_task(two.post(CHAT))
        assert (await anext(watched)).calls == 1
        two.script.go.set()
        assert (await anext(watched)).calls == 0
        await call


async def test_no_call_in_flight_moves_none(two: House) -> None:
    assert await two.close_cell(0) == 0
    assert await two.close_cell(7) == 0


async def test_a_call_waits_for_a_cell(two: House) -> None:
    await two.close_cell(0)
    await two.close_cell(1)
    call = asyncio.create_task(two.post(CHAT))
    assert not (await asyncio.wait([call], timeout=0.05))[0]
    await two.open_cell(0)
    assert (await call)[0] == 200


async def test_no_cell_in_time_is_a_503_with_retry_after(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, cells=0, wait_s=0.05) as built:
        access = built.access["g000001.00"]
        headers = {"Authorization": f"Bearer {access.key}"}
        url = f"{access.base_url}/chat/completions"
        async with built.http.post(url, json=CHAT, headers=headers) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        assert (await built.totals()).failed_calls == 1


async def test_an_engine_that_is_deaf_to_aborts_does_not_hold_the_cell(two: House) -> None:
    two.script.deaf = True
    two.script.pause_at = 2
    call = asyncio.create_task(two.post(CHAT))
    await two.script.paused.wait()
    source = two.script.engines_used()[-1]
    two.script.pause_at = None
    assert await two.close_cell(int(source[-1])) == 1
    assert (await call)[0] == 200


async def test_a_lost_cells_calls_go_on_elsewhere(two: House) -> None:
    two.script.pause_at = 2
    call = asyncio.create_task(two.post(CHAT))
    await two.script.paused.wait()
    source = two.script.engines_used()[-1]
    two.script.pause_at = None
    assert await two.close_cell(int(source[-1]), lost=True) == 1
    assert (await call)[0] == 200
    assert two.kept.records[0].reroutes == 1


async def test_a_dead_engines_calls_go_on_elsewhere(two: House) -> None:
    two.script.pause_at = 2
    call = asyncio.create_task(two.post(CHAT))
    await two.script.paused.wait()
    source = two.script.engines_used()[-1]
    two.script.pause_at = None
    await two.engines[int(source[-1])].tell(Die())
    assert (await call)[0] == 200
    assert two.script.engines_used()[-1] != source
    # It is not asked again before its cell has another life.
    await two.open("g000001.01")
    await two.post(CHAT, "g000001.01")
    assert two.script.engines_used()[-1] != source


@pytest.mark.parametrize("fault", ["asleep", "failing"])
async def test_an_engine_that_refuses_is_left_for_another(two: House, fault: str) -> None:
    two.script.__dict__[fault].add("cell1")
    for execution in ("g000001.01", "g000001.02"):
        await two.open(execution)
        assert (await two.post(CHAT, execution))[0] == 200
    used = two.script.engines_used()
    assert "cell1" in used and used[-1] == "cell0"
    assert (await two.totals()).failed_calls == 0


async def test_the_only_engine_is_tried_again(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path) as built:
        built.script.asleep.add("cell0")
        call = asyncio.create_task(built.post(CHAT))
        await built.script.asked.wait()
        built.script.asleep.clear()
        assert (await call)[0] == 200


@pytest.mark.parametrize(
    ("refusal", "status"), [(ContextOverflow(900, 512), 400), (ValueError("top_p = 7"), 500)]
)
async def test_what_every_engine_would_refuse_is_not_tried_again(
    two: House, refusal: Exception, status: int
) -> None:
    two.script.refusal = refusal
    found, answer = await two.post(CHAT)
    assert found == status
    assert str(refusal) in answer["error"]["message"]
    assert len(two.script.requests) == 1


async def test_an_engine_that_only_fails_is_given_up(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, wait_s=0.2) as built:
        built.script.asleep.add("cell0")
        status, answer = await built.post(CHAT)
        assert (status, answer["error"]["code"]) == (503, "unavailable")


async def test_many_calls_survive_a_cell_that_comes_and_goes(two: House) -> None:
    executions = [f"g000002.{n:02d}" for n in range(8)]
    for execution in executions:
        await two.open(execution)
    calls = [asyncio.create_task(two.post(CHAT, execution)) for execution in executions * 3]
    for _ in range(5):
        await two.close_cell(0)
        await asyncio.sleep(0)
        await two.open_cell(0)
        await two.close_cell(1)
        await asyncio.sleep(0)
        await two.open_cell(1)
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 24
    assert len({record.output_ids for record in two.kept.records}) == 1
    assert (await two.totals()).in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_gets_the_sample_that_was_under_way(two: House, stream: bool) -> None:
    await two.hang_up_on(CHAT | {"stream": True})
    again = asyncio.create_task(two.post(CHAT | {"stream": stream}))
    await asyncio.wait([again], timeout=0.05)
    two.script.go.set()
    assert (await again)[0] == 200
    assert len(two.kept.records) == len(two.script.requests) == 1
    assert two.kept.retried == ["g000001.00-0-0000"]
    assert (await two.totals()).retries == 1


async def test_a_repeated_request_gets_the_sample_that_was_recorded(two: House) -> None:
    await two.hang_up_on(CHAT)
    two.script.go.set()
    await two.until(calls=1)
    _, answer = await two.post(CHAT)
    assert answer["id"] == "chatcmpl-g000001.00-0-0000"
    assert len(two.kept.records) == 1
    # Now that it is delivered, the same request asks for something new.
    _, answer = await two.post(CHAT)
    assert answer["id"] == "chatcmpl-g000001.00-0-0001"
    assert (await two.totals()).retries == 1


async def test_alike_requests_of_waiting_clients_are_calls_of_their_own(two: House) -> None:
    statuses = await asyncio.gather(*(two.post(CHAT) for _ in range(3)))
    assert {answer["id"][-4:] for _, answer in statuses} == {"0000", "0001", "0002"}
    assert len({request.sampling.seed for _, request in two.script.requests}) == 3
    assert (await two.totals()).retries == 0


async def test_a_client_that_counts_its_retries_is_believed(two: House) -> None:
    two.script.pause_at = 1
    first = asyncio.create_task(two.post(CHAT))
    await two.script.paused.wait()
    again = asyncio.create_task(two.post(CHAT, headers={"x-stainless-retry-count": "1"}))
    await asyncio.wait([again], timeout=0.05)
    two.script.go.set()
    answers = [answer for _, answer in await asyncio.gather(first, again)]
    assert answers[0] == answers[1]


async def test_another_agents_alike_request_is_no_repetition(two: House) -> None:
    await two.hang_up_on(CHAT)
    two.script.go.set()
    await two.post(CHAT, headers={"x-claude-code-agent-id": "a2"})
    await two.until(calls=2)
    assert (await two.totals()).retries == 0


async def test_a_call_nobody_waits_for_is_still_recorded(two: House) -> None:
    await two.hang_up_on(CHAT)
    two.script.go.set()
    await two.until(calls=1, in_flight=0)
    assert len(two.kept.records) == 1
    assert (await two.totals()).failed_calls == 0


async def test_kill_9_of_an_engines_process_is_not_noticed(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path, cells=0) as built:
        config = CountingConfig(first_token=40, tokens=50, seconds_a_token=0.02)
        for cell in range(2):
            spec = ProcessSpec(
                name=f"process-{cell}",
                actor="tests.proxy.process_engine:CountingEngine",
                config=config,
                restart="temporary",
            )
            built.engines[cell] = await built.node.spawn(spec)
            await built.open_cell(cell)
        await built.node.spawn(ChildSpec(name="mourner", start=lambda: Mourner(list(built.engines.values()))))
        call = asyncio.create_task(built.post(CHAT))
        pids = [asyncio.create_task(ref.ask(GetPid())) for ref in built.engines.values()]
        (first,), others = await asyncio.wait(pids, return_when=asyncio.FIRST_COMPLETED)
        os.kill(first.result(), signal.SIGKILL)
        assert (await call)[0] == 200
        (record,) = built.kept.records
        assert record.output_ids == tuple(range(40, 90))
        assert record.reroutes == 1
        assert (await built.totals()).failed_calls == 0
        await asyncio.wait(others)
