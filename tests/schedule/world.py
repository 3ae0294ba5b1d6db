"""Small actors around a WaterlevelActor: they do what they are asked and note it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from gyre.actors import Actor, ChildSpec, Node, Ref, Tell, handles
from gyre.cell.engine.base import EngineMetrics
from gyre.cell.messages import (
    CellGone,
    CellStatus,
    CellUp,
    EnterRollout,
    EnterTrain,
    GetStatus,
    Publish,
    RoleChanged,
    SaveCheckpoint,
    TurnBack,
    UpdateWeights,
)
from gyre.schedule.actor import WaterlevelActor, WaterlevelActorConfig
from gyre.schedule.messages import (
    CallsInFlight,
    CloseRoute,
    Connect,
    Dispatch,
    EvalDone,
    ExecutionFinished,
    ExecutionsDispatched,
    MicroStepsReady,
    OpenRoute,
    RouteClosed,
    StepDone,
    WatchCalls,
)

GROUP_SIZE = 4
CAPACITY = 4
EVAL_EXECUTIONS = 2


class Notes:
    """What happened, in order, such as ("enter_train", 1)."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []
        self.past: set[tuple[Any, ...]] = set()
        self._more = asyncio.Event()
        self._held: dict[tuple[Any, ...], asyncio.Event] = {}
        self.failing: set[tuple[Any, ...]] = set()
        self.going_back: set[tuple[Any, ...]] = set()
        self.unwanted: TurnBack | None = None

    async def note(self, *what: Any) -> None:
        """Notes it, then fails or waits where the test said so."""
        self.all.append(what)
        self.past.add(what)
        self._more.set()
        if what in self.failing:
            raise RuntimeError(f"{what} was to fail")
        if what in self._held:
            await self._held[what].wait()

    def hold(self, *what: Any) -> asyncio.Event:
        """What happens like this will wait for the event."""
        return self._held.setdefault(what, asyncio.Event())

    async def next(self, *what: Any) -> None:
        """Waits until this has happened once more, and drops all up to it."""
        while what not in self.all:
            self._more.clear()
            await self._more.wait()
        del self.all[: self.all.index(what) + 1]


class Crash(Tell, frozen=True, kw_only=True):
    reason: str


class Cell(Actor):
    def __init__(self, cell: int, notes: Notes) -> None:
        self._cell = cell
        self._notes = notes
        self.version = 0

    async def _change(self, what: str, role: Any) -> RoleChanged:
        await self._notes.note(what, self._cell)
        changed = RoleChanged(cell=self._cell, role=role, version=0, seconds=0.1, states_s={"pull": 0.1})
        back = "rollout" if role == "train" else "train"
        unwanted, self._notes.unwanted = self._notes.unwanted, None
        if unwanted is not None:
            return msgspec.structs.replace(changed, role=back, outcome="turned_back", cause=unwanted.cause)
        if (what, self._cell) in self._notes.going_back:
            self._notes.going_back.remove((what, self._cell))
            return msgspec.structs.replace(changed, role=back, outcome="failed", cause="pull: no weights")
        return changed

    @handles(TurnBack, concurrent=True)
    async def turn_back(self, message: TurnBack) -> None:
        self._notes.unwanted = message
        await self._notes.note("turn_back", self._cell)

    @handles(EnterTrain)
    async def enter_train(self, message: EnterTrain) -> RoleChanged:
        return await self._change("enter_train", "train")

    @handles(EnterRollout)
    async def enter_rollout(self, message: EnterRollout) -> RoleChanged:
        return await self._change("enter_rollout", "rollout")

    @handles(UpdateWeights)
    async def update(self, message: UpdateWeights) -> RoleChanged:
        return await self._change("update", "rollout")

    @handles(Publish)
    async def publish(self, message: Publish) -> int:
        await self._notes.note("publish")
        self.version += 1
        return self.version

    @handles(SaveCheckpoint)
    async def save(self, message: SaveCheckpoint) -> str:
        await self._notes.note("save")
        return "checkpoints/step"

    @handles(Crash, concurrent=True)
    async def crash(self, message: Crash) -> None:
        raise RuntimeError(message.reason)

    @handles(GetStatus)
    async def status(self, message: GetStatus) -> CellStatus:
        await self._notes.note("status", self._cell)
        return CellStatus(
            cell=self._cell,
            role="rollout",
            changing=False,
            version=0,
            micro_steps=0,
            tokens_per_s=0.0,
            busy_fraction=0.0,
            engine=EngineMetrics(),
        )


class Neighbours(Actor):
    """Proxy, harness and queue in one."""

    def __init__(self, notes: Notes, waterlevel: Ref) -> None:
        self._notes = notes
        self._waterlevel = waterlevel
        self.moved = 2
        self.calls: asyncio.Queue[int] = asyncio.Queue()

    @handles(WatchCalls)
    async def watch_calls(self, message: WatchCalls) -> AsyncIterator[CallsInFlight]:
        while True:
            yield CallsInFlight(calls=await self.calls.get())

    @handles(OpenRoute)
    async def open_route(self, message: OpenRoute) -> None:
        await self._notes.note("open_route", message.cell, message.incarnation)

    @handles(CloseRoute)
    async def close_route(self, message: CloseRoute) -> RouteClosed:
        await self._notes.note("close_route", message.cell, message.lost)
        return RouteClosed(calls=self.moved, recomputed=self.moved, states_s={"cancel": 0.1})

    @handles(CellGone)
    async def gone(self, message: CellGone) -> None:
        await self._notes.note("cell_gone", message.cell, message.incarnation)

    @handles(Dispatch)
    async def dispatch(self, message: Dispatch) -> None:
        await self._notes.note("dispatch", message.split, message.groups, message.version)
        executions = EVAL_EXECUTIONS if message.split == "eval" else message.groups * GROUP_SIZE
        dispatched = ExecutionsDispatched(
            split=message.split, executions=executions, groups=max(1, message.groups)
        )
        await self._waterlevel.tell(dispatched)


class World:
    """A job whose executions, micro-steps and steps are what the test tells."""

    def __init__(self, node: Node, notes: Notes) -> None:
        self.node = node
        self.notes = notes
        self.waterlevel: Ref
        self.neighbours: Neighbours
        self.cells: dict[int, Ref] = {}

    async def start(self, config: WaterlevelActorConfig) -> None:
        spec = ChildSpec(name="waterlevel", start=lambda: WaterlevelActor(config), restart="temporary")
        self.waterlevel = await self.node.spawn(spec)
        self.neighbours = Neighbours(self.notes, self.waterlevel)
        around = await self.node.spawn(ChildSpec(name="around", start=lambda: self.neighbours))
        await self.waterlevel.ask(Connect(proxy=around, harness=around, queue=around))

    async def up(self, cell: int, incarnation: int = 1, version: int = 0) -> None:
        spec = ChildSpec(
            name=f"cell-{cell}.{incarnation}", start=lambda: Cell(cell, self.notes), restart="temporary"
        )
        self.cells[cell] = await self.node.spawn(spec)
        up = CellUp(
            cell=cell,
            incarnation=incarnation,
            ref=self.cells[cell],
            engines=(self.cells[cell],),
            role="rollout",
            version=version,
            capacity_calls=CAPACITY,
            window_tokens=100,
        )
        await self.waterlevel.tell(up)

    async def crash(self, cell: int, reason: str) -> None:
        await self.cells[cell].tell(Crash(reason=reason))

    async def finish(self, executions: int, split: Any = "train") -> None:
        for index in range(executions):
            await self.waterlevel.tell(ExecutionFinished(execution=f"x{index}", split=split))

    async def ready(self, step: int, unclaimed: int, complete: bool = False) -> None:
        message = MicroStepsReady(step=step, unclaimed=unclaimed, uncommitted=unclaimed, complete=complete)
        await self.waterlevel.tell(message)

    async def calls(self, in_flight: int) -> None:
        await self.neighbours.calls.put(in_flight)

    async def done(self, step: int) -> None:
        await self.waterlevel.tell(StepDone(step=step, version=step + 1))

    async def evaluated(self, version: int) -> None:
        await self.finish(EVAL_EXECUTIONS, "eval")
        await self.waterlevel.tell(EvalDone(step=version, version=version, score=0.5, executions=2))
