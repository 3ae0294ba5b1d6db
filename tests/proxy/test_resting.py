"""KV that stays with a cell that trains: until the cell is back, or a call of its session comes elsewhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.cell.engine import GenerateRequest, KvManifest
from gyre.proxy.conversation import CallError
from tests.proxy.cells import Cell, Cells, Die, answer, cells, request, scripted
from tests.proxy.test_migration import turns

PROMPT = tuple(range(64))


@asynccontextmanager
async def resting(shm: Path, sessions: int = 1, **options: Any) -> AsyncIterator[tuple[Cells, Cell, Cell]]:
    """Two cells; sessions were at the first one, found no place, and it sleeps."""
    async with cells(shm, scripted(kv_rest_bytes=2**20), kv_rests=True, **options) as world:
        # Without any call in flight all go to the latest.
        other, source = world.cells
        for session in range(sessions):
            await world.call(request(f"c{session}", f"s{session}", (session, *PROMPT), 10))
        other.before_import = refuse
        closed = await world.routes.close(source.number, lost=False, change="r1")
        assert [*closed.states_s][-2:] == ["migrate_idle", "rest_idle"]
        assert (closed.recomputed_by, world.routes.kv.rested) == ({}, sessions)
        other.before_import = None
        await source.engine.sleep()
        yield world, other, source


async def refuse(cell: Cell, manifest: KvManifest) -> None:
    raise RuntimeError("it has no room")


def next_call(session: int = 0) -> GenerateRequest:
    """What the session goes on with after a tool."""
    first = request(f"c{session}", f"s{session}", (session, *PROMPT), 10)
    said = [*first.prompt_ids, *answer(first)[0]]
    return request(f"d{session}", f"s{session}", [*said, 5], 10)


async def test_a_cell_that_is_back_has_it_again(shm: Path) -> None:
    async with resting(shm, sessions=8) as (world, _, source):
        await source.engine.wake(world.weights(0))
        world.open(source)
        for session in range(8):
            asked = next_call(session)
            got = await world.call(asked)
            assert (got.token_ids, got.cached_tokens) == (answer(asked)[0], 72)
        assert world.routes.kv.recomputed.total() == 0
        # 65 + 9 tokens each.
        assert source.engine.metrics().kv_tokens_put_back == 8 * 72


async def test_a_call_that_comes_while_the_cell_trains_has_it_sent(shm: Path) -> None:
    async with resting(shm) as (world, other, source):
        asked = next_call()
        again = request("e0", "s0", asked.prompt_ids, 7)
        # Sub-agents of one session call side by side.
        got, side = await asyncio.gather(world.call(asked), world.call(again))
        assert (got.token_ids, got.logprobs) == answer(asked)
        assert (got.cached_tokens, side.cached_tokens) == (72, 72)
        assert source.engine.metrics().kv_bytes_resting == 0
        assert other.engine.metrics().kv_tokens_imported == 72
        assert world.routes.kv.sessions == 1
        # It stays there.
        await source.engine.wake(world.weights(0))
        world.open(source)
        assert (await world.call(request("f0", "s0", asked.prompt_ids, 3))).cached_tokens == 72
        assert source.engine.metrics().generated_tokens == 10
    assert world.left() == []


@pytest.mark.parametrize("to", ["back", "elsewhere"])
async def test_kv_of_other_weights_is_computed_again(shm: Path, to: str) -> None:
    async with resting(shm) as (world, other, source):
        if to == "back":
            await source.engine.wake(world.weights(1))
            world.open(source)
            assert source.engine.metrics().kv_rests_dropped == 1
        else:
            await other.engine.update(world.weights(1))
        asked = next_call()
        got = await world.call(asked)
        assert (got.token_ids, got.logprobs) == answer(asked, version=1)
        assert (got.cached_tokens, {*got.kv_versions}) == (0, {1})


@pytest.mark.parametrize(
    ("fault", "to"),
    [
        ("corrupt", "back"),
        ("corrupt", "elsewhere"),
        ("gone", "elsewhere"),
        ("dead", "elsewhere"),
        ("dies in the midst of it", "elsewhere"),
    ],
)
async def test_what_is_lost_or_wrong_is_computed_again(shm: Path, fault: str, to: str) -> None:
    async with resting(shm) as (world, other, source):
        (file,) = [shm / name for name in os.listdir(shm) if "-rest-" in name]
        if fault == "corrupt":
            np.memmap(file, np.uint8, "r+")[300] ^= 1
        elif fault == "gone":
            os.unlink(file)
        elif fault == "dead":
            await die(source)
        elif fault.startswith("dies"):
            source.after_export = lambda cell, manifest: die(cell)
        if to == "back":
            await source.engine.wake(world.weights(0))
            world.open(source)
            assert source.engine.metrics().kv_rests_dropped == 1
        asked = next_call()
        got = await world.call(asked)
        assert (got.token_ids, got.logprobs) == answer(asked)
        assert got.cached_tokens == 0
        assert other.engine.metrics().kv_blocks_used == 0
        assert world.routes.kv.recomputed.total() == (to == "elsewhere")
    assert world.left() == []


async def die(cell: Cell) -> None:
    assert cell.ref is not None
    await cell.ref.tell(Die())
    await cell.engine.close()
    await cell.backend.close()


async def test_streams_over_role_changes_whose_cells_keep_what_finds_no_place(shm: Path) -> None:
    """One cell trains at any time, and the others take nothing while they are not asked to."""
    wrong: list[str] = []
    make = scripted(pass_s=0.004, kv_rest_bytes=2**20)
    async with cells(shm, make, count=3, kv_budget_s=0.2, kv_rests=True) as world:
        streams = [asyncio.create_task(turns(world, session, 15, wrong)) for session in range(24)]
        for change in range(15):
            cell = world.cells[change % 3]
            for one in world.cells:
                one.before_import = refuse if change % 2 else None
            await world.routes.close(cell.number, lost=False, change=f"r{change}")
            await cell.engine.sleep()
            for one in world.cells:
                one.before_import = None
            await asyncio.sleep(0.01)
            await cell.engine.wake(world.weights(0))
            world.open(cell)
        assert sum(await asyncio.gather(*streams)) == 24 * 15
        assert wrong == []
        assert world.routes.kv.rested > 0
        for cell in world.cells:
            metrics = cell.engine.metrics()
            assert (metrics.kv_blocks_used, metrics.kv_blocks_pinned, metrics.kv_bytes_resting) == (0, 0, 0)
            assert metrics.kv_rests_dropped == 0
        assert world.left() == []


async def test_kv_that_is_lost_with_its_cell_is_counted(shm: Path) -> None:
    async with resting(shm, sessions=2) as (world, _, source):
        world.routes.forget_session("s0")
        await world.routes.close(source.number, lost=True)
        assert world.routes.kv.recomputed == {"rest_lost": 1}
    async with resting(shm, sessions=2) as (world, _, source):
        # Another life has nothing.
        source.incarnation += 1
        await source.engine.wake(world.weights(0))
        world.open(source)
        assert world.routes.kv.recomputed == {"rest_lost": 2}


async def test_sessions_that_neither_move_nor_rest_are_counted(shm: Path) -> None:
    async with cells(shm, scripted(kv_rest_bytes=1), kv_rests=True) as world:
        other, source = world.cells
        for session in range(4):
            await world.call(request(f"c{session}", f"s{session}", (session, *PROMPT), 10))
        other.before_import = refuse
        closed = await world.routes.close(source.number, lost=False, change="r1")
        assert closed.recomputed_by == {"import_RuntimeError": 3, "left_behind": 1}
        assert world.routes.kv.rested == 0


@pytest.mark.parametrize("comes", ["while it rests", "before it rests"])
async def test_a_call_that_comes_while_no_cell_is_open_has_it_sent_to_the_first_one(
    shm: Path, comes: str
) -> None:
    async with cells(shm, scripted(kv_rest_bytes=2**20), kv_rests=True) as world:
        other, source = world.cells
        await world.call(request("c0", "s0", (0, *PROMPT), 10))
        await world.routes.close(other.number, lost=False)
        closing = asyncio.create_task(world.routes.close(source.number, lost=False, change="r1"))
        if comes == "while it rests":
            await closing
        await asyncio.sleep(0)
        asked = next_call()
        calling = asyncio.create_task(world.call(asked))
        await asyncio.sleep(0)
        assert closing.done() == (comes == "while it rests")
        await closing
        await source.engine.sleep()
        await asyncio.sleep(0)
        assert not calling.done()
        world.open(other)
        got = await calling
        assert (got.token_ids, got.cached_tokens) == (answer(asked)[0], 72)
        # Nothing of it is left to be sent once more.
        assert source.engine.metrics().kv_bytes_resting == 0
        await world.call(request("e0", "s0", asked.prompt_ids, 3))
        assert (world.routes.kv.sessions, world.routes.kv.recomputed.total()) == (1, 0)


async def test_no_cell_in_time_ends_a_call_whose_kv_rests(shm: Path) -> None:
    async with resting(shm, wait_s=0.05) as (world, other, _):
        await world.routes.close(other.number, lost=False)
        with pytest.raises(CallError, match=r"no cell took the call within 0\.05 s"):
            await world.call(next_call())


async def test_patience_begins_when_its_kv_has_come(shm: Path) -> None:
    async with resting(shm, wait_s=0.8) as (world, other, source):

        async def linger(cell: Cell, manifest: KvManifest) -> None:
            await asyncio.sleep(0.9)
            await world.routes.close(other.number, lost=True)
            asyncio.get_running_loop().call_later(0.05, world.open, other)

        source.after_export = linger
        asked = next_call()
        assert (await world.call(asked)).token_ids == answer(asked)[0]
