"""What stands around a cell's parts in their tests: ranks that write down what they are asked, a queue that
answers by a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from gyre.actors import Actor, Ask, handles
from gyre.cell.messages import (
    Accept,
    Claim,
    HandOver,
    Idle,
    Lease,
    ReturnLease,
    RoleState,
    Stale,
    StepCommitted,
    StepComplete,
    StopClaiming,
)
from gyre.cell.worker_messages import TrainMicroStep, WriteCheckpoint
from gyre.loss import MicroStep, MicroStepStats
from gyre.rdma import RegionHandle

Answer = Lease | HandOver | StepComplete | Idle | Stale


def region(name: str = "w0") -> RegionHandle:
    return RegionHandle(backend="shm", name=name, nbytes=4)


def micro_step(name: str = "0.g000000.0", step: int = 0) -> MicroStep:
    return MicroStep(id=name, step=step, group="g000000", trajectories=())


def lease(token: int, version: int = 0) -> Lease:
    return Lease(token=token, version=version, micro_step=micro_step(f"{version}.g000000.{token}", version))


class Ranks:
    """All ranks of a cell. `answers` by message type: a value, or a function of the message; who is not in
    it answers None. A message type in `fail` raises."""

    def __init__(self, count: int = 2, answers: dict[type, Any] | None = None) -> None:
        self.count = count
        self.asked: list[Any] = []
        self.answers: dict[type, Any] = {TrainMicroStep: MicroStepStats(trajectories=1), **(answers or {})}
        self.fail: dict[type, Exception] = {}
        self.gates: dict[type, asyncio.Event] = {}
        self.reached: dict[type, asyncio.Event] = {}

    def gate(self, kind: type) -> tuple[asyncio.Event, asyncio.Event]:
        """Messages of that type wait for the second event; the first says that one does."""
        self.reached[kind], self.gates[kind] = asyncio.Event(), asyncio.Event()
        return self.reached[kind], self.gates[kind]

    async def all(self, message: Ask[Any]) -> list[Any]:
        self.asked.append(message)
        return [await self._answer(message) for _ in range(self.count)]

    async def one(self, rank: int, message: Ask[Any]) -> Any:
        self.asked.append((rank, message))
        return await self._answer(message)

    async def _answer(self, message: Ask[Any]) -> Any:
        kind = type(message)
        if kind in self.gates:
            self.reached[kind].set()
            await self.gates[kind].wait()
        if kind in self.fail:
            raise self.fail[kind]
        answer = self.answers.get(kind)
        return answer(message) if callable(answer) else answer

    @property
    def names(self) -> list[str]:
        """What was asked, in order; with `@rank` where it was one of them."""
        return [
            f"{type(asked[1]).__name__}@{asked[0]}" if isinstance(asked, tuple) else type(asked).__name__
            for asked in self.asked
        ]


def fill_checkpoint(message: WriteCheckpoint) -> None:
    (message.folder / "model.safetensors").write_bytes(b"weights")


class ScriptedQueue(Actor):
    """Answers claims from a script; when it is over they wait, until StopClaiming gives them `last`. What it
    is told is in `seen`; `accepts` says what becomes of a contribution."""

    def __init__(
        self, script: Iterable[Answer] = (), accepts: Callable[[Accept], bool] = lambda _: True
    ) -> None:
        self._script = list(script)
        self._accepts = accepts
        self._waiting: asyncio.Future[Answer] | None = None
        self.last: Answer = Idle()
        self.seen: list[Any] = []
        self.committed: asyncio.Queue[StepCommitted] = asyncio.Queue()
        self.drained = asyncio.Event()
        self._states: asyncio.Queue[RoleState] = asyncio.Queue()

    async def told(self, state: str) -> str | None:
        """What made that state of a role change fail, when it is over."""
        while (passed := await self._states.get()).state != state:
            pass
        return passed.cause

    def answer(self, claim: Answer) -> None:
        """The one that waits."""
        assert self._waiting is not None
        self.drained.clear()
        self._waiting.set_result(claim)

    @handles(RoleState)
    async def role_state(self, message: RoleState) -> None:
        self._states.put_nowait(message)

    @handles(Claim, concurrent=True)
    async def claim(self, message: Claim) -> Lease | HandOver | StepComplete | Idle | Stale:
        self.seen.append(message)
        if self._script:
            return self._script.pop(0)
        self._waiting = asyncio.get_running_loop().create_future()
        self.drained.set()
        return await self._waiting

    @handles(StopClaiming)
    async def stop_claiming(self, message: StopClaiming) -> None:
        self.seen.append(message)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(self.last)

    @handles(ReturnLease)
    async def return_lease(self, message: ReturnLease) -> None:
        self.seen.append(message)

    @handles(Accept)
    async def accept(self, message: Accept) -> bool:
        self.seen.append(message)
        return self._accepts(message)

    @handles(StepCommitted)
    async def step_committed(self, message: StepCommitted) -> None:
        self.committed.put_nowait(message)
