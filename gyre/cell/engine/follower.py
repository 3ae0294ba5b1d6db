"""A rank of an engine that another one leads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import structlog

from gyre.cell.engine.base import Weights, unpack_ids
from gyre.cell.engine.orders import (
    AddUp,
    Done,
    FillSlot,
    Leave,
    Order,
    PassReader,
    ReleaseKv,
    TakeKv,
    TakeSlot,
    TakeWeights,
    is_pass,
    pack_answer,
    unpack,
)
from gyre.cell.engine.runner import Runner
from gyre.cell.engine.team import Team
from gyre.rdma import RegionHandle

log = structlog.get_logger()


class Follower:
    """Does on `device_thread` what rank 0 says, between other jobs there; passes took `busy_s` so far. Holds
    nothing once rank 0 has slept or is gone. Where it cannot go on it leaves, which rank 0 sees."""

    def __init__(
        self,
        runner: Runner,
        device_thread: ThreadPoolExecutor,
        weights: Callable[[int, RegionHandle], Weights],
    ) -> None:
        self._runner = runner
        self._thread = device_thread
        self._weights = weights
        self._team: Team | None = None
        self._passes = PassReader()
        self.busy_s = 0.0

    def join(self, team: Team) -> None:
        """On the device thread."""
        self.leave()
        self._team = team
        self._passes = PassReader()
        self._runner.sum = team.total
        (line,) = team.lines
        line.start(
            lambda frame: self._queue(partial(self._obey, team, frame)),
            lambda: self._queue(partial(self._end, team)),
        )

    def leave(self) -> None:
        """As `part`, and rank 0 need not fear for this one."""
        if self._team is not None:
            with suppress(OSError):
                self._team.lines[0].send(pack_answer(Done(leaving=True)))
        self.part()

    def part(self) -> None:
        """Frees what it has; on the device thread."""
        if (team := self._team) is not None:
            self._team = None
            self._runner.release_kv()
            self._runner.release_weights()
            self._runner.sum = None
            team.close()

    def close(self) -> None:
        """For good; on the device thread."""
        self.leave()
        self._runner.close()

    def _queue(self, job: Callable[[], None]) -> None:
        self._thread.submit(job)

    def _end(self, team: Team) -> None:
        if team is self._team:
            self.part()

    def _obey(self, team: Team, frame: bytes) -> None:
        if team is not self._team:
            return
        try:
            if is_pass(frame):
                began_s = time.monotonic()
                self._runner.follow(self._passes.unpack(frame))
                self.busy_s += time.monotonic() - began_s
            else:
                team.lines[0].send(pack_answer(self._carry_out(unpack(frame))))
        except Exception as error:
            log.error("engine_rank_failed", rank=team.rank, error=repr(error))
            self.part()

    def _carry_out(self, order: Order) -> Done:
        try:
            return self._do(order)
        except Exception as error:
            return Done(error=f"{type(error).__name__}: {error}")

    def _do(self, order: Order) -> Done:
        match order:
            case TakeWeights(version=version, region=region):
                self._runner.take_weights(self._weights(version, region))
            case TakeKv(slot_bytes=slot_bytes):
                self._runner.take_kv(slot_bytes)
                return Done(pool=self._runner.file)
            case FillSlot(blocks=blocks, slot=slot):
                self._runner.fill_slot(unpack_ids(blocks), slot)
            case TakeSlot(blocks=blocks, heads=heads, slot=slot, nbytes=nbytes):
                return Done(sums=self._runner.take_slot(unpack_ids(blocks), heads, slot, nbytes))
            case AddUp(blocks=blocks):
                return Done(sums=self._runner.finite_sums(0, unpack_ids(blocks)) or b"")
            case ReleaseKv():
                self._runner.release_kv()
            case Leave():
                self._runner.release_weights()
        return Done()
