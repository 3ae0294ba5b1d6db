"""KV of pools that others cannot read, by host memory. On a CPU the copies to and from a GPU are plain ones;
on two GPUs: GYRE_TEST_DEVICE=cuda pytest tests/cell/engine/test_staged_kv.py."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cell.engine import Engine, KvManifest, KvUnavailable, SamplingParams, pack_ids
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.kv_relay import SLOTS_OUT, Declined, Filled, KvRelay, Taken, Want
from gyre.cell.engine.native import NativeEngine
from gyre.rdma import Backend, BackendName, PeerLost, RegionError, SharedMemory, make_backend
from gyre.rdma.shm_backend import ShmBackend
from tests.cell.engine.calls import generate, prompt, until
from tests.cell.engine.conftest import ModelWeights, NativeCase, TensorCase
from tests.cell.engine.followers import Followers
from tests.rdma.conftest import Holder, Process

ONE = SamplingParams(temperature=0.0, max_new_tokens=1)
# 3 blocks of the tiny model.
SLOT_BYTES = 3 * 4096


class Staged:
    """Engines whose pools nobody else reads, each with a backend of its own."""

    def __init__(self, shm: Path, followers: Followers) -> None:
        self.by: BackendName = "shm"
        self._cases: list[NativeCase] = []
        self._backends: list[Backend] = []
        self._shm = shm
        self._followers = followers

    async def awake(self, seed: int = 0, ranks: int = 1, **options: Any) -> NativeEngine:
        case = (
            NativeCase("llama", self._shm)
            if ranks == 1
            else TensorCase("llama", self._shm, self._followers, ranks)
        )
        self._cases.append(case)
        backend = make_backend(self.by, where="127.0.0.1", token=b"secret", shared=case.regions)
        self._backends.append(backend)
        await backend.start()
        home = KvHome(backend, case.regions, f"kv-{len(self._cases)}", SLOT_BYTES)
        return await case.awake(seed, **{"kv_home": home, **options})

    def weights(self, seed: int) -> ModelWeights:
        return self._cases[0].weights(seed)

    async def close(self) -> None:
        for case in self._cases:
            await case.close()
        for backend in self._backends:
            await backend.close()


@pytest.fixture
async def staged(shm: Path, followers: Followers) -> AsyncIterator[Staged]:
    made = Staged(shm, followers)
    yield made
    await made.close()
    left = []
    with suppress(FileNotFoundError):
        left = os.listdir(shm)
    assert [name for name in left if not name.startswith("weights-")] == []


def relay(engine: NativeEngine) -> KvRelay:
    assert engine._moves is not None and engine._moves._turns is not None
    return engine._moves._turns.relay


async def slots_are_free(*engines: NativeEngine) -> None:
    """That a slot was read is told after that."""
    async with asyncio.timeout(5.0):
        for engine in engines:
            while len(relay(engine)._free) < SLOTS_OUT:
                await relay(engine)._changed.wait()


async def move(first: Engine, second: Engine, session: str = "s") -> int:
    manifest = await first.export_kv(session)
    assert 0 < manifest.slot_blocks < len(manifest.blocks) or len(manifest.blocks) < 10
    taken = await second.import_kv(manifest)
    assert await first.release_kv(manifest.pin)
    return taken


@pytest.mark.parametrize("by", ["shm", "tcp"])
async def test_a_session_goes_on_from_what_came_slot_by_slot(staged: Staged, by: BackendName) -> None:
    staged.by = by
    first, second = await staged.awake(), await staged.awake()
    want = await generate(first, prompt(200))
    # So that its blocks do not follow one another.
    await generate(second, prompt(60, seed=1))
    await generate(second, prompt(90, seed=2), session="t")
    assert await move(first, second) == 216
    got = await generate(second, prompt(200))
    assert got.cached_tokens == 192
    assert (got.token_ids, got.logprobs) == (want.token_ids, pytest.approx(want.logprobs, abs=1e-4))
    await slots_are_free(first, second)
    assert (first.metrics().kv_blocks_used, second.metrics().kv_blocks_used) == (0, 0)


async def test_several_take_over_and_give_at_once(staged: Staged) -> None:
    engines = [await staged.awake() for _ in range(3)]
    wanted = []
    for number, engine in enumerate(engines):
        wanted.append(await generate(engine, prompt(200, seed=number), session=f"s{number}"))
    moves = [
        move(one, other, f"s{number}")
        for number, one in enumerate(engines)
        for other in engines
        if other is not one
    ]
    assert await asyncio.gather(*moves) == [216] * 6
    for number, want in enumerate(wanted):
        for engine in engines:
            got = await generate(engine, prompt(200, seed=number))
            assert (got.cached_tokens, got.token_ids) == (192, want.token_ids)
    await slots_are_free(*engines)


async def test_two_ranks_hand_over_to_one_and_one_to_two(staged: Staged) -> None:
    two, one = await staged.awake(ranks=2), await staged.awake()
    want = await generate(one, prompt(40))
    assert await move(one, two) == 56
    got = await generate(two, prompt(40))
    assert (got.cached_tokens, got.token_ids) == (32, want.token_ids)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    longer = prompt(40) + want.token_ids + prompt(30, seed=1)
    first = await generate(two, longer)
    assert await move(two, one) == (len(longer) + 19) // 8 * 8
    second = await generate(one, longer)
    assert second.cached_tokens == len(longer) // 8 * 8
    assert second.token_ids == first.token_ids
    assert second.logprobs == pytest.approx(first.logprobs, abs=1e-4)
    other = await staged.awake(ranks=2)
    assert await move(two, other) > 0
    assert (await generate(other, longer)).token_ids == first.token_ids


@pytest.mark.parametrize("ranks", [1, 2])
async def test_blocks_that_changed_are_refused(staged: Staged, ranks: int) -> None:
    first, second = await staged.awake(), await staged.awake(ranks=ranks)
    await generate(first, prompt(200))
    manifest = await first.export_kv("s")
    first._runner.kv.data[manifest.blocks[-2], 1, 1, 7, 1, 15] += 1.0
    with pytest.raises(KvUnavailable, match="other bytes"):
        await second.import_kv(manifest)
    assert second.metrics().kv_blocks_used == 0
    assert (await generate(second, prompt(200), ONE)).cached_tokens == 0


async def test_only_what_is_pinned_is_given(staged: Staged) -> None:
    first, second = await staged.awake(), await staged.awake()
    await generate(first, prompt(100), ONE, session="secret")
    await generate(first, prompt(40, seed=1), ONE)
    secret = await first.export_kv("secret")
    await first.release_kv(secret.pin)
    manifest = await first.export_kv("s")
    forged = msgspec.structs.replace(secret, pin=manifest.pin, proof=manifest.proof)
    with pytest.raises(KvUnavailable, match="not pinned"):
        await second.import_kv(forged)
    sums = tuple(msgspec.structs.replace(part, sums=bytes(len(part.sums))) for part in manifest.parts)
    with pytest.raises(KvUnavailable, match="other bytes"):
        await second.import_kv(msgspec.structs.replace(manifest, parts=sums))
    large = msgspec.structs.replace(manifest, slot_blocks=1000)
    with pytest.raises(KvUnavailable, match="bytes, not"):
        await second.import_kv(large)
    await first.release_kv(manifest.pin)
    with pytest.raises((KvUnavailable, RegionError)):
        await second.import_kv(manifest)
    assert second.metrics().kv_blocks_used == 0
    await slots_are_free(first, second)


async def test_a_stage_and_a_pool_do_not_go_together(staged: Staged, native: NativeCase) -> None:
    pool, stage = await native.awake(), await staged.awake()
    for seed, (one, other) in enumerate(((pool, stage), (stage, pool))):
        await generate(one, prompt(40, seed=seed))
        manifest = await one.export_kv("s")
        with pytest.raises(KvUnavailable, match="stage"):
            await other.import_kv(manifest)
        await one.release_kv(manifest.pin)


@pytest.mark.parametrize("by", ["shm", "tcp"])
async def test_what_rests_goes_by_no_stage_of_who_sleeps(staged: Staged, by: BackendName) -> None:
    """Out of the memory where it rests: on this host from there, by TCP by a staging area."""
    staged.by = by
    first, second = await staged.awake(kv_rest_bytes=2**20), await staged.awake()
    want = await generate(first, prompt(200))
    # So that its blocks are in no order.
    await generate(first, prompt(90, seed=2), session="t")
    rested = await first.rest_kv(["t", "s"], 10.0)
    await first.sleep()
    manifest = await first.export_kv("s")
    assert (manifest.slot_blocks, rested.tokens) == (0, 216 + 104)
    assert await second.import_kv(manifest) == 216
    assert await first.release_kv(manifest.pin)
    got = await generate(second, prompt(200))
    assert (got.cached_tokens, got.token_ids) == (192, want.token_ids)
    forged = msgspec.structs.replace(await first.export_kv("t"), slot_blocks=manifest.slot_blocks + 3)
    with pytest.raises(KvUnavailable):
        await second.import_kv(forged)
    assert await first.release_kv(forged.pin)
    assert first.metrics().kv_bytes_resting == 0
    await first.wake(staged.weights(0))
    await generate(first, prompt(200))
    await first.rest_kv(["s"], 10.0)
    await first.sleep()
    await first.wake(staged.weights(0))
    assert (await generate(first, prompt(200))).cached_tokens == 192
    assert first.metrics().kv_blocks_used == second.metrics().kv_blocks_used == 0


@pytest.mark.parametrize("who", ["source", "destination"])
async def test_who_falls_asleep_meanwhile_leaves_nothing(staged: Staged, who: str) -> None:
    first, second = await staged.awake(), await staged.awake()
    await generate(first, prompt(200), ONE)
    manifest = await first.export_kv("s")
    taking = asyncio.create_task(second.import_kv(manifest))
    await until(second, lambda _: bool(relay(second)._wanted))
    sleeper = first if who == "source" else second
    async with asyncio.timeout(10.0):
        await sleeper.sleep()
        with pytest.raises((KvUnavailable, RegionError, RuntimeError)):
            await taking
    if who == "destination":
        assert await first.release_kv(manifest.pin)
        await slots_are_free(first)


async def test_a_slot_that_is_filled_for_nobody_is_free_again(staged: Staged) -> None:
    thread = ThreadPoolExecutor(1)
    first, second = await staged.awake(device_thread=thread), await staged.awake()
    await generate(first, prompt(200), ONE)
    manifest = await first.export_kv("s")
    go = threading.Event()
    thread.submit(go.wait, 30.0)
    taking = asyncio.create_task(second.import_kv(manifest))
    async with asyncio.timeout(10.0):
        while relay(first)._free:  # noqa: ASYNC110 - until both wait for the thread
            await asyncio.sleep(0.001)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        go.set()
        await slots_are_free(first)
        assert await second.import_kv(manifest) == 200
    assert await first.release_kv(manifest.pin)
    await first.close()
    thread.shutdown()


async def test_a_giver_that_is_killed_is_not_waited_for(shm: Path) -> None:
    """It has heard what is wanted, and says nothing."""
    process = Process(shm)
    holder = Holder(process, "shm")
    await holder.start()
    manifest = KvManifest(
        session="s",
        layout=None,  # type: ignore[arg-type]
        newest=0,
        tokens=b"",
        blocks=(0,),
        parts=(),
        pin="pin",
        proof=await holder.hold("proof", 8),
        lease_s=1000.0,
    )
    backend = ShmBackend(SharedMemory(shm))
    await backend.start()
    taker = KvRelay(backend, lambda blocks, slot: Future(), slot_blocks=3)

    async def take() -> None:
        async with taker.turn(manifest, [0]):
            raise AssertionError("nobody gave anything")

    taking = asyncio.create_task(take())
    assert (await holder.ask("hear")).text.startswith(backend.address)
    assert not taking.done()
    process.kill()
    async with asyncio.timeout(5.0):
        with pytest.raises(PeerLost, match="it is gone"):
            await taking
    assert not taker._wanted
    process.end()
    await taker.close()
    await backend.close()


async def test_no_error_of_a_write_is_left_unheard(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that fails ends the import, and the next fails after that."""
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    first, second = await staged.awake(), await staged.awake()
    assert second._moves is not None and second._moves._turns is not None
    await generate(first, prompt(200), ONE)
    manifest = await first.export_kv("s")
    for block in manifest.blocks:
        first._runner.kv.data[block, 1, 1, 7, 1, 15] += 1.0
    go, write = (threading.Event(), threading.Event()), second._moves._turns._write
    writes = itertools.count()

    def held(*what: Any) -> None:
        go[min(next(writes), 1)].wait(30.0)
        write(*what)

    monkeypatch.setattr(second._moves._turns, "_write", held)
    taking = asyncio.create_task(second.import_kv(manifest))
    async with asyncio.timeout(10.0):
        await until(first, lambda _: len(relay(first)._free) == 0)
        go[0].set()
        await until(first, lambda _: len(relay(first)._free) == 1)
        go[1].set()
        with pytest.raises(KvUnavailable, match="other bytes"):
            await taking
    await first.release_kv(manifest.pin)
    await slots_are_free(first, second)
    gc.collect()
    assert unheard == []


_TOLD = st.one_of(
    st.builds(Want, st.integers(0, 3), st.sampled_from(["pin", "gone"]), st.binary(max_size=9)),
    st.builds(Want, st.integers(0, 3), st.just("pin"), st.lists(st.integers(0, 4), max_size=4).map(pack_ids)),
    st.builds(Filled, st.integers(0, 3), st.integers(-1, 9), st.sampled_from(["pin", "gone"])),
    st.builds(Declined, st.integers(0, 3), st.text(max_size=5)),
    st.builds(Taken, st.integers(0, 3), st.sampled_from(["pin", "gone"])),
).map(msgspec.msgpack.encode)


@settings(max_examples=40, deadline=None)
@given(st.lists(_TOLD | st.binary(max_size=30), max_size=8))
def test_whatever_is_told_takes_no_slot_for_good(notes: list[bytes]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as folder,
        asyncio.Runner() as runner,
    ):
        runner.run(tell(SharedMemory(Path(folder)), notes))


async def tell(shared: SharedMemory, notes: list[bytes]) -> None:
    giver, taker = ShmBackend(shared), ShmBackend(shared)
    await giver.start()
    await taker.start()
    filled: list[Sequence[int]] = []

    def fill(blocks: Sequence[int], slot: int) -> Future[None]:
        assert 0 <= slot < SLOTS_OUT
        filled.append(blocks)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    it = KvRelay(giver, fill, slot_blocks=3)
    it.give("pin", range(4))
    for note in notes:
        await taker.notify(giver.address, note)
    it.end("pin")
    await it.close()
    assert sorted(it._free) == [*range(SLOTS_OUT)]
    assert all(0 < len(blocks) <= 3 and {*blocks} <= {0, 1, 2, 3} for blocks in filled)
    await taker.close()
    await giver.close()
