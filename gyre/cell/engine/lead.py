"""The leading rank of an engine over several: it plans and draws, and has the others compute their shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import structlog
import torch

from gyre.cell.engine import kv_bytes
from gyre.cell.engine.base import EngineFault, KvLayout, KvUnavailable, Weights, pack_ids
from gyre.cell.engine.handover import KvMemory
from gyre.cell.engine.kv_home import PoolFile
from gyre.cell.engine.kv_relay import SLOTS_IN, SLOTS_OUT
from gyre.cell.engine.orders import (
    AddUp,
    BadOrder,
    Done,
    FillSlot,
    Leave,
    Order,
    PassWriter,
    ReleaseKv,
    TakeKv,
    TakeSlot,
    TakeWeights,
    pack,
    unpack_answer,
)
from gyre.cell.engine.runner import Runner
from gyre.cell.engine.scheduler import Span
from gyre.cell.engine.share import Share
from gyre.cell.engine.team import Team
from gyre.cell.weights import RegionWeights
from gyre.rdma import PageLock, RegionHandle
from gyre.rdma.shm import Attached

log = structlog.get_logger()


class _Pool(NamedTuple):
    """Another rank's part of the pool, mapped here, or its stage (then there is no `data`)."""

    heads: tuple[int, int]
    data: torch.Tensor | None
    mapped: Attached
    file: RegionHandle


class RankFailed(RuntimeError):
    """What another rank said that it could not do."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank


class Lead:
    """A `rollout.Runner` over rank 0's own and those of `ranks` - 1 followers. Its methods belong to the
    device thread. Once a follower is gone while there are weights, or a pass failed, it is `lost`, for good:
    `on_lost` is called on some thread, what is asked raises EngineFault, and only memory is freed."""

    def __init__(
        self,
        runner: Runner,
        ranks: int,
        on_lost: Callable[[], None],
        file: PoolFile | None = None,
    ) -> None:
        """`file`: where rank 0's part of the pool or its stage lies, and so do those of other ranks, if
        others are to read them."""
        self._runner = runner
        self._ranks = ranks
        self._on_lost = on_lost
        self._shared = file and file.shared
        self._slot_bytes = file.slot_bytes if file is not None else 0
        self._pools: list[_Pool] = []
        self._team: Team | None = None
        self._others: list[_Other] = []
        self._passes = PassWriter(runner.block_tokens)
        self._awake = False
        self.lost: Future[str] = Future()

    def join(self, team: Team) -> None:
        self.part()
        self._team = team
        self._runner.sum = team.total
        self._passes = PassWriter(self._runner.block_tokens)
        self._others = [_Other(rank) for rank in range(1, self._ranks)]
        for line, other in zip(team.lines, self._others, strict=True):
            line.start(other.answered, partial(self._gone, team, other))

    def part(self) -> None:
        """The others see the end of their lines, and free what they have."""
        self._awake = False
        if (team := self._team) is not None:
            self._team = None
            self._runner.sum = None
            team.close()

    def check(self) -> None:
        """Raises EngineFault where it is lost."""
        if self.lost.done():
            raise EngineFault(f"the engine is lost: {self.lost.result()}")

    @property
    def vocab(self) -> int:
        return self._runner.vocab

    @property
    def kv_bytes(self) -> int:
        return self._runner.kv_bytes

    def run(self, spans: Sequence[Span]) -> list[tuple[Span, int, float]]:
        team = self._met()
        frame = self._passes.pack(spans)
        try:
            for line in team.lines:
                line.send(frame)
            drawn = self._runner.run(spans)
            # NCCL does not raise where it is aborted: then numbers are wrong.
            self.check()
            return drawn
        except Exception as error:
            # The others are somewhere within the pass: nothing can be computed together any more.
            self._lose(team, f"a pass failed: {error!r}")
            raise

    def take_weights(self, weights: Weights) -> None:
        if not isinstance(weights, RegionWeights):
            raise TypeError(f"{type(weights).__name__} is not in a region that all ranks read")
        self._awake = True
        self._together(
            TakeWeights(version=weights.version, region=weights.region),
            partial(self._runner.take_weights, weights),
        )

    def take_kv(self) -> None:
        answers = self._together(TakeKv(self._slot_bytes), self._runner.take_kv)
        shares = [Share(rank, self._ranks) for rank in range(1, self._ranks)]
        for share, answer in zip(shares, answers, strict=True):
            if self._shared is not None and answer.pool is not None:
                mapped = self._shared.attach(answer.pool, writable=True)
                data = None
                if not self._slot_bytes:
                    own = self._runner.kv.data
                    data = torch.frombuffer(mapped.view(), dtype=own.dtype).view(own.shape)
                self._pools.append(_Pool(self._runner.heads_of(share), data, mapped, answer.pool))

    def release_kv(self) -> None:
        mapped = [pool.mapped for pool in self._pools]
        self._pools = []
        for pool in mapped:
            # Else it ends with the last view of it.
            with contextlib.suppress(BufferError):
                pool.close()
        self._free(ReleaseKv(), self._runner.release_kv)

    def release_weights(self) -> None:
        self._free(Leave(), self._runner.release_weights)
        self.part()

    def kv_layout(self, version: int) -> KvLayout:
        return self._runner.kv_layout(version)

    def kv_memory(self) -> tuple[KvMemory, ...]:
        if len(self._pools) != self._ranks - 1:
            raise KvUnavailable("KV of several GPUs is not handed over from GPU to GPU")
        others = [KvMemory(pool.heads, pool.mapped.view(), pool.file) for pool in self._pools]
        return (*self._runner.kv_memory(), *others)

    def settle(self) -> None:
        """Of a pass that is over here the others have written what it adds up."""
        self._runner.settle()

    def sums(self, rank: int, blocks: Sequence[int]) -> bytes:
        if rank == 0:
            return self._runner.sums(rank, blocks)
        if (data := self._pools[rank - 1].data) is not None:
            return kv_bytes.sums(data, blocks)
        return self._ask(rank, AddUp(pack_ids(blocks))).sums

    def finite_sums(self, rank: int, blocks: Sequence[int]) -> bytes | None:
        if rank == 0:
            return self._runner.finite_sums(rank, blocks)
        if (data := self._pools[rank - 1].data) is not None:
            return kv_bytes.finite_sums(data, blocks)
        return self._ask(rank, AddUp(pack_ids(blocks))).sums or None

    def write_kv(self, rank: int, blocks: Sequence[int], heads: tuple[int, int], source: memoryview) -> bytes:
        if rank == 0:
            return self._runner.write_kv(rank, blocks, heads, source)
        pool = self._pools[rank - 1]
        if pool.data is not None:
            return kv_bytes.write_blocks(pool.data, blocks, pool.heads, heads, source)
        start = SLOTS_OUT * (pool.mapped.nbytes // (SLOTS_OUT + SLOTS_IN))
        pool.mapped.view()[start : start + source.nbytes] = source
        return self._ask(rank, TakeSlot(pack_ids(blocks), heads, SLOTS_OUT, source.nbytes)).sums

    @property
    def slot_blocks(self) -> int:
        return self._runner.slot_blocks

    def fill_slot(self, blocks: Sequence[int], slot: int) -> None:
        self._together(FillSlot(pack_ids(blocks), slot), partial(self._runner.fill_slot, blocks, slot))

    def read_kv(self, rank: int, blocks: Sequence[int], target: memoryview) -> None:
        if rank == 0:
            self._runner.read_kv(rank, blocks, target)
        elif (data := self._pools[rank - 1].data) is not None:
            kv_bytes.read_blocks(data, blocks, target)
        else:
            raise KvUnavailable("KV of several GPUs does not rest")

    @property
    def page_lock(self) -> PageLock | None:
        return self._runner.page_lock

    # --- all ranks ------------------------------------------------------------------------------

    def _ask(self, rank: int, order: Order) -> Done:
        (done,) = self._each({rank: order}, lambda: None)
        return done

    def _together(self, order: Order, own: Callable[[], None]) -> list[Done]:
        return self._each(dict.fromkeys(range(1, self._ranks), order), own)

    def _each(self, orders: Mapping[int, Order], own: Callable[[], None]) -> list[Done]:
        """Has them carried out while this rank does its part. Raises what that raises, else RankFailed for
        the first other one that could not."""
        self._met()
        self._tell(orders)
        try:
            own()
        finally:
            found = {rank: self._others[rank - 1].answer() for rank in orders}
        done: list[Done] = []
        for rank, answer in found.items():
            if answer is None:
                raise EngineFault(f"rank {rank} is gone")
            if answer.error is not None:
                raise RankFailed(rank, answer.error)
            done.append(answer)
        return done

    def _free(self, order: Order, own: Callable[[], None]) -> None:
        """On all ranks that there are: one that is gone holds nothing any more."""
        told = {} if self._team is None or self.lost.done() else dict.fromkeys(range(1, self._ranks), order)
        self._tell(told)
        try:
            own()
        finally:
            for rank in told:
                other = self._others[rank - 1]
                answer = other.answer()
                if (answer is None and not other.left) or (answer and answer.error):
                    log.warning("engine_rank_not_freed", rank=rank, error=answer and answer.error)

    def _tell(self, orders: Mapping[int, Order]) -> None:
        """Whoever cannot be told is gone: that is its answer."""
        for rank, order in orders.items():
            with contextlib.suppress(OSError):
                assert self._team is not None
                self._team.lines[rank - 1].send(pack(order))

    def _met(self) -> Team:
        self.check()
        if self._team is None:
            raise EngineFault("the ranks of the engine have not met")
        return self._team

    def _gone(self, team: Team, other: _Other) -> None:
        """On the line's thread. One that left is missed when something is asked."""
        other.answers.put(None)
        if self._awake and not other.left:
            self._lose(team, f"rank {other.rank} is gone")

    def _lose(self, team: Team, why: str) -> None:
        """From any thread."""
        # Perhaps it is already, by another rank or a pass that failed of that.
        with contextlib.suppress(InvalidStateError):
            self.lost.set_result(why)
        team.total.abort()
        self._on_lost()


class _Other:
    """A following rank as its line tells of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.answers: SimpleQueue[Done | None] = SimpleQueue()
        self.left = False

    def answered(self, frame: bytes) -> None:
        """On the line's thread."""
        try:
            answer = unpack_answer(frame)
        except BadOrder as error:
            answer = Done(error=f"answers nonsense: {error}")
        if answer.leaving:
            self.left = True
        else:
            self.answers.put(answer)

    def answer(self) -> Done | None:
        """Waits for the next one; None, again and again, where it is gone."""
        answer = self.answers.get()
        if answer is None:
            self.answers.put(None)
        return answer
