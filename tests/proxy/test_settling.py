"""Engines tell what they sampled for an execution, and forget it when that is written down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from gyre.actors import Actor, ChildSpec, Node, Ref, handles
from gyre.cell.engine import SampledLeg
from gyre.cell.messages import EndSession, ForgetSession
from gyre.proxy.settling import settle
from gyre.trajectory.records import RecordSampled
from tests.proxy.scripted import Die, Mourner

LEG = SampledLeg(call="x-1-0000", stay=0, tokens=3)
OTHER = SampledLeg(call="x-1-0001", stay=1, tokens=1)


@dataclass
class Engine:
    legs: tuple[SampledLeg, ...]
    refuses: bool = False
    forgot: list[str] = field(default_factory=list)


class EngineActor(Actor):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @handles(EndSession)
    async def end(self, message: EndSession) -> tuple[SampledLeg, ...]:
        if self._engine.refuses:
            raise RuntimeError("not now")
        return self._engine.legs

    @handles(ForgetSession)
    async def forget(self, message: ForgetSession) -> None:
        self._engine.forgot.append(message.session)

    @handles(Die)
    async def die(self, message: Die) -> None:
        self.context.stop()


@dataclass
class Trajectory:
    full: bool = False
    told: list[tuple[SampledLeg, ...]] = field(default_factory=list)


class TrajectoryActor(Actor):
    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    @handles(RecordSampled)
    async def record(self, message: RecordSampled) -> None:
        if self._trajectory.full:
            raise OSError("database or disk is full")
        self._trajectory.told.append(message.legs)


@dataclass
class Room:
    node: Node
    trajectory: Trajectory = field(default_factory=Trajectory)
    refs: list[Ref] = field(default_factory=list)

    async def settle(self, *engines: Engine) -> None:
        keeper = await self.node.spawn(
            ChildSpec(name="trajectory", start=lambda: TrajectoryActor(self.trajectory))
        )
        for number, engine in enumerate(engines):
            start = lambda engine=engine: EngineActor(engine)  # type: ignore[misc]  # noqa: E731
            spec = ChildSpec(name=f"engine-{number}", start=start, restart="temporary")
            self.refs.append(await self.node.spawn(spec))
        await settle("x", self.refs, keeper, 10.0)
        for ref in self.refs:
            if not engines[self.refs.index(ref)].refuses:
                # Behind what it was told.
                await ref.ask(EndSession(session="x"))


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    async with Node(name="test") as node:
        yield Room(node)


async def test_what_engines_sampled_is_recorded_and_then_forgotten(room: Room) -> None:
    first, second, idle = Engine((LEG,)), Engine((OTHER,)), Engine(())
    await room.settle(first, second, idle)
    assert room.trajectory.told == [(LEG, OTHER)]
    assert (first.forgot, second.forgot, idle.forgot) == (["x"], ["x"], [])


async def test_what_is_not_written_down_is_not_forgotten(room: Room) -> None:
    engine = Engine((LEG,))
    room.trajectory.full = True
    await room.settle(engine)
    assert engine.forgot == []


async def test_while_one_does_not_tell_none_forgets(room: Room) -> None:
    engine, silent = Engine((LEG,)), Engine((OTHER,), refuses=True)
    await room.settle(silent, engine)
    assert room.trajectory.told == [(LEG,)]
    assert engine.forgot == []


async def test_a_dead_engine_has_nothing_to_tell(room: Room) -> None:
    dead, engine = Engine((OTHER,)), Engine((LEG,))
    spec = ChildSpec(name="dead", start=lambda: EngineActor(dead), restart="temporary")
    ref = await room.node.spawn(spec)
    await room.node.spawn(ChildSpec(name="mourner", start=lambda: Mourner([ref])))
    await ref.tell(Die())
    keeper = await room.node.spawn(
        ChildSpec(name="trajectory", start=lambda: TrajectoryActor(room.trajectory))
    )
    living = await room.node.spawn(ChildSpec(name="living", start=lambda: EngineActor(engine)))
    await settle("x", [ref, living], keeper, 10.0)
    await living.ask(EndSession(session="x"))
    assert room.trajectory.told == [(LEG,)]
    assert engine.forgot == ["x"]
