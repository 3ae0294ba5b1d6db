"""Streams of the native engine over role changes: no byte differs, with migrated and with recomputed KV."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gyre.cell.engine import GenerateRequest, OnPublish, SamplingParams
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.native import NativeEngine
from gyre.proxy.routes import Sample
from tests.cell.engine.calls import prompt
from tests.cell.engine.conftest import DEVICE, NATIVE_OPTIONS, NativeCase, tiny_model
from tests.proxy.cells import Cells, cells

# All of it: GYRE_TEST_STREAMS=1000 GYRE_TEST_CHANGES=50. A stream is one call; a session has TURNS of them.
STREAMS = int(os.environ.get("GYRE_TEST_STREAMS", "24"))
CHANGES = int(os.environ.get("GYRE_TEST_CHANGES", "6"))
TURNS = 4

pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's batch-invariant mode wants bfloat16"),
    pytest.mark.timeout(1800 if STREAMS > 24 else 60),
]


def engine(number: int, home: KvHome, on_publish: OnPublish = "recompute") -> NativeEngine:
    options = {**NATIVE_OPTIONS, "window_tokens": 512, "kv_home": home, "batch_invariant": True}
    options["on_publish"] = on_publish
    return NativeEngine(tiny_model("llama", 12345), **options)


class Answers:
    """Tokens and log-probabilities by call."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._more = asyncio.Event()

    def add(self, call: str, got: Sample) -> None:
        assert call not in self.found
        self.found[call] = (got.token_ids, got.logprobs)
        self._more.set()

    async def reach(self, count: int) -> None:
        while len(self.found) < count:
            self._more.clear()
            await self._more.wait()


async def session(world: Cells, number: int, answers: Answers) -> None:
    """A harness: turns, each with all that was said before."""
    said: list[int] = list(prompt(40, seed=number % 7))
    for turn in range(TURNS):
        said += prompt(5, seed=number)
        asked = asked_of(f"c{number}-{turn}", f"s{number}", said)
        got: Sample = await world.call(asked)
        answers.add(asked.call, got)
        said += got.token_ids
        await asyncio.sleep(0.01)


def asked_of(call: str, session: str, ids: Sequence[int]) -> GenerateRequest:
    sampling = SamplingParams(seed=5, temperature=1.1, max_new_tokens=16)
    return GenerateRequest(
        call=call, session=session, prompt_ids=tuple(ids), prompt_tokens=len(ids), sampling=sampling
    )


async def run(
    folder: Path, case: NativeCase, changes: int, kv_budget_s: float
) -> tuple[dict[str, Any], Cells]:
    """With so many changes, as many streams between any two."""
    answers, in_flight = Answers(), 0
    made = cells(folder, engine, kv_budget_s=kv_budget_s, weights=lambda version: case.weights(version))
    async with made as world:
        numbers = range(STREAMS // TURNS)
        waiting = [asyncio.create_task(session(world, number, answers)) for number in numbers]
        for change in range(changes):
            await answers.reach((change + 1) * STREAMS // (changes + 1))
            closed = await world.change(world.cells[change % len(world.cells)])
            in_flight += closed.calls
        await asyncio.gather(*waiting)
        assert in_flight >= changes
        for cell in world.cells:
            metrics = cell.engine.metrics()
            assert (metrics.kv_blocks_used, metrics.kv_blocks_pinned) == (0, 0)
        assert world.left() == []
    return answers.found, world


async def test_no_byte_differs_from_a_run_without_role_changes(native: NativeCase, shm: Path) -> None:
    want, _ = await run(shm, native, 0, 0.0)
    assert len(want) == STREAMS // TURNS * TURNS
    recomputed, world = await run(shm, native, CHANGES, 0.0)
    assert recomputed == want
    assert world.routes.kv.sessions == 0
    migrated, world = await run(shm, native, CHANGES, 10.0)
    assert migrated == want
    assert world.routes.kv.sessions > CHANGES // 2


@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
async def test_kv_of_the_version_before_is_never_served_unless_it_is_marked(
    native: NativeCase, shm: Path, on_publish: OnPublish
) -> None:
    """v+1 is published while KV is read."""
    made = cells(shm, partial(engine, on_publish=on_publish), weights=lambda version: native.weights(version))
    async with made as world:
        asked = asked_of("c0", "s0", prompt(200))
        said = [*asked.prompt_ids, *(await world.call(asked)).token_ids]
        source = max(world.cells, key=lambda cell: cell.engine.metrics().generated_tokens)
        (other,) = [cell for cell in world.cells if cell is not source]

        async def publish(*_: object) -> None:
            update = asyncio.create_task(other.engine.update(native.weights(1)))
            updates.append(update)

        updates: list[asyncio.Task[None]] = []
        other.before_import = publish
        await world.routes.close(source.number, lost=False)
        await asyncio.gather(*updates)
        assert len(updates) == 1
        again = asked_of("c1", "s0", said)
        got = await world.call(again)
        assert set(got.versions) == {1}
        assert (world.routes.kv.sessions, set(got.kv_versions)) == (
            (1, {0}) if on_publish == "keep" else (0, {1})
        )
        if on_publish == "keep":
            # Whoever is not marked gets what a fresh engine gives.
            again = asked_of("c2", "s1", said)
            got = await world.call(again)
        fresh = engine(9, native.homes.new())
        await fresh.wake(native.weights(1))
        (chunks,) = [[chunk async for chunk in fresh.generate(again)]]
        assert got.token_ids == [token for chunk in chunks for token in chunk.token_ids]
        assert got.logprobs == [logprob for chunk in chunks for logprob in chunk.logprobs]
        await fresh.close()
