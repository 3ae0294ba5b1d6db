"""KV that goes with its sessions when their cell leaves, and every way in which it does not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from gyre.cell.engine import GenerateRequest, KvManifest
from gyre.cell.engine.handover import Reservation
from gyre.cell.engine.scripted import NoWeights, ScriptedEngine
from tests.proxy.cells import Cell, Cells, Die, Fault, answer, cells, request, scripted


async def turns(world: Cells, session: int, count: int, wrong: list[str]) -> int:
    """Calls of one harness, each with all that was said before; answers how many."""
    draw = random.Random(session)
    said: list[int] = [session % 97] * 17
    for turn in range(count):
        said += [draw.randrange(97) for _ in range(draw.randrange(1, 12))]
        asked = request(f"c{session}-{turn}", f"s{session}", said, draw.randrange(2, 14))
        got = await world.call(asked)
        if (got.token_ids, got.logprobs) != answer(asked) or got.finish_reason != "length":
            wrong.append(asked.call)
        said += got.token_ids
        # A tool is running.
        await asyncio.sleep(draw.random() * 0.004)
    return count


# 7 s of work, which a busy machine does in many times that.
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kv_budget_s", [0.0, 10.0])
async def test_a_thousand_streams_over_fifty_role_changes(shm: Path, kv_budget_s: float) -> None:
    wrong: list[str] = []
    # Passes are so slow that the streams outlast the changes.
    async with cells(shm, scripted(pass_s=0.008), count=3, kv_budget_s=kv_budget_s) as world:
        streams = [asyncio.create_task(turns(world, session, 25, wrong)) for session in range(40)]
        changes = in_flight = 0
        while changes < 50:
            closed = await world.change(world.cells[changes % 3])
            changes, in_flight = changes + 1, in_flight + closed.calls
            await asyncio.sleep(0.01)
        assert sum(await asyncio.gather(*streams)) == 1000
        assert wrong == []
        assert in_flight > 100
        kv = world.routes.kv
        if kv_budget_s:
            assert kv.sessions > 200 and kv.tokens > 10_000
            # What has no full block yet cannot be moved.
            assert {*kv.recomputed} <= {"pin_KvUnavailable", "left_behind"}
        else:
            assert kv.sessions == 0
        for cell in world.cells:
            metrics = cell.engine.metrics()
            assert (metrics.kv_blocks_used, metrics.kv_blocks_pinned) == (0, 0)
        assert world.left() == []


# More than are sampled while a busy machine does something else.
NEW_TOKENS = 200


async def in_flight(world: Cells) -> tuple[GenerateRequest, asyncio.Task[object], Cell]:
    """A call that has some tokens, and where it is."""
    asked = request("c0", "s0", [n % 97 for n in range(100)], NEW_TOKENS)
    call = asyncio.create_task(world.call(asked))
    while True:
        for cell in world.cells:
            if cell.engine.metrics().generated_tokens > 5:
                return asked, call, cell
        await asyncio.sleep(0.001)


async def test_a_call_in_flight_goes_on_without_computing_again(shm: Path) -> None:
    async with cells(shm, scripted(pass_s=0.002)) as world:
        asked, call, source = await in_flight(world)
        closed = await world.routes.close(source.number, lost=False, change="r1")
        got = await call
        assert (got.token_ids, got.logprobs) == answer(asked)
        assert (closed.calls, closed.sessions_moved, closed.recomputed) == (1, 1, 0)
        assert closed.kv_nbytes == world.routes.kv.nbytes > 0
        assert [*closed.states_s] == [
            "stop_admitting",
            "pin",
            "cancel",
            "migrate",
            "hand_over",
            "migrate_idle",
        ]
        (other,) = [cell for cell in world.cells if cell is not source]
        # The last tokens before it was cancelled, less than two blocks.
        assert other.engine.metrics().prefilled_tokens < 16
        assert other.engine.metrics().kv_tokens_imported >= 96


@pytest.mark.parametrize("lost", [False, True])
async def test_a_call_that_went_on_elsewhere_runs_nowhere_else(shm: Path, lost: bool) -> None:
    """An abort that reached no worker left an orphan, which decoded beside its retry (slime PR 2340)."""
    async with cells(shm, scripted(pass_s=0.002)) as world:
        asked, call, source = await in_flight(world)
        await world.routes.close(source.number, lost=lost, change="r1")
        got = await call
        assert (got.token_ids, got.logprobs) == answer(asked)
        metrics = source.engine.metrics()
        assert (metrics.running, metrics.waiting) == (0, 0)
        # As an orphan it would have sampled all of them.
        assert metrics.generated_tokens < NEW_TOKENS - 10


async def test_an_idle_session_finds_its_kv_at_another_engine(shm: Path) -> None:
    async with cells(shm, scripted()) as world:
        asked = request("c0", "s0", range(64), 10)
        said = [*asked.prompt_ids, *(await world.call(asked)).token_ids]
        source = max(world.cells, key=lambda cell: cell.engine.metrics().generated_tokens)
        closed = await world.routes.close(source.number, lost=False)
        assert (closed.calls, closed.sessions_moved) == (0, 1)
        again = request("c1", "s0", [*said, 5], 10)
        got = await world.call(again)
        assert got.token_ids == answer(again)[0]
        assert got.cached_tokens == 72


async def test_what_has_no_time_left_is_left_behind(shm: Path) -> None:
    async with cells(shm, scripted(), kv_budget_s=0.05) as world:
        for session in range(6):
            await world.call(request(f"c{session}", f"s{session}", range(64), 2))

        async def slow(cell: Cell, manifest: KvManifest) -> None:
            await asyncio.sleep(0.2)

        for cell in world.cells:
            cell.before_import = slow
        # Without any call in flight all went to the latest cell.
        closed = await world.routes.close(1, lost=False)
        assert closed.recomputed_by["left_behind"] >= 1
        assert closed.sessions_moved == 0
        again = request("again", "s0", range(64), 4)
        assert (await world.call(again)).token_ids == answer(again)[0]


async def source_dies(cell: Cell, manifest: KvManifest) -> None:
    assert cell.ref is not None
    await cell.ref.tell(Die())
    await cell.engine.close()
    await cell.backend.close()


async def link_drops(cell: Cell, manifest: KvManifest) -> None:
    await cell.backend.close()


async def block_is_corrupt(cell: Cell, manifest: KvManifest) -> None:
    assert isinstance(cell.engine, ScriptedEngine)
    cell.engine._script._kv[manifest.blocks[3], 0, 1, 2, :, 0] ^= np.int32(4)


async def destination_dies(cell: Cell, manifest: KvManifest) -> None:
    assert cell.ref is not None
    await cell.ref.tell(Die())
    await asyncio.sleep(10.0)


async def destination_is_full(cell: Cell, manifest: KvManifest) -> None:
    assert isinstance(cell.engine, ScriptedEngine)
    pool = cell.engine._rollout._scheduler.pool
    taken = pool.take(pool.available)
    assert taken
    # As when those that hold it end.
    ended = Reservation(manifest)
    ended.own = taken
    engine = cell.engine
    asyncio.get_running_loop().call_later(0.1, lambda: engine._submit(lambda: engine._rollout.refuse(ended)))


async def destination_has_other_weights(cell: Cell, manifest: KvManifest) -> None:
    await cell.engine.update(NoWeights(1))


@pytest.mark.parametrize(
    ("at_source", "fault", "reason"),
    [
        (True, source_dies, "ActorDied"),
        (True, link_drops, "import_"),
        (True, block_is_corrupt, "import_KvUnavailable"),
        (False, destination_dies, "import_ActorDied"),
        (False, destination_is_full, "import_KvUnavailable"),
        (False, destination_has_other_weights, "import_KvUnavailable"),
    ],
)
async def test_whatever_fails_the_call_is_answered(
    shm: Path, at_source: bool, fault: Fault, reason: str
) -> None:
    async with cells(shm, scripted(pass_s=0.002), count=3) as world:
        asked, call, source = await in_flight(world)
        for cell in world.cells:
            if at_source and cell is source:
                cell.after_export = fault
            elif not at_source and cell is not source:
                cell.before_import = fault
        closed = await world.routes.close(source.number, lost=False)
        for cell in world.cells:
            cell.before_import = None
        got = await call
        if fault is destination_has_other_weights:
            cut = got.versions.index(1)
            rest = request("c0", "s0", [*asked.prompt_ids, *got.token_ids[:cut]], NEW_TOKENS - cut)
            assert got.token_ids[:cut] == answer(asked)[0][:cut]
            assert (got.token_ids[cut:], got.logprobs[cut:]) == answer(rest, version=1)
        else:
            assert (got.token_ids, got.logprobs) == answer(asked)
        assert (closed.calls, closed.sessions_moved, closed.recomputed) == (1, 0, 1)
        assert any(reason in name for name in closed.recomputed_by), closed.recomputed_by
        for cell in world.cells:
            metrics = cell.engine.metrics()
            if fault is not source_dies or cell is not source:
                assert (metrics.kv_blocks_used, metrics.kv_blocks_pinned) == (0, 0)
    assert world.left() == []
