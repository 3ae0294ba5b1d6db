"""Complaints of restarts, of names, and of what a method's kind does to others."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from gyre.actors import (
    Actor,
    ActorError,
    Ask,
    AwaitChild,
    ChildSpec,
    Node,
    NodeFailed,
    ProcessSpec,
    Ref,
    Spec,
    Supervision,
    Supervisor,
    handles,
)
from tests.actors.conftest import start
from tests.actors.zoo import Add, Counter, CounterConfig, Crash, Pid, Quit


class Work(Ask[int], frozen=True, kw_only=True):
    seconds: float


class AsyncWorker(Actor):
    """Many calls at a time."""

    @handles(Work, concurrent=True)
    async def work(self, message: Work) -> int:
        await asyncio.sleep(message.seconds)
        return 1

    @handles(Pid, concurrent=True)
    async def pid(self, message: Pid) -> int:
        return os.getpid()


async def test_calls_retried_while_an_async_actor_restarts_all_end(node: Node) -> None:
    """Calls to an async actor that was restarted, with retries, hung for ever (ray#11683, ray#11990)."""
    spec = ProcessSpec(name="w", actor="tests.actors.complaints.test_restarts:AsyncWorker")
    top = await node.spawn(ChildSpec(name="top", start=lambda: Supervisor([spec])))
    first = await top.ask(AwaitChild(name="w"))
    pid = await first.ask(Pid())
    failures = 0

    async def retried() -> int:
        nonlocal failures
        worker: Ref | None = first
        while True:
            assert worker is not None
            try:
                # The first life ends before any is answered.
                return await worker.ask(Work(seconds=100.0 if worker == first else 0.2), timeout_s=110.0)
            except ActorError:
                failures += 1
                worker = await top.ask(AwaitChild(name="w", after=worker))

    calls = [asyncio.ensure_future(retried()) for _ in range(50)]
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(50):
        assert await asyncio.gather(*calls) == [1] * 50
    assert failures == 50


class Plain(Actor):
    def __init__(self) -> None:
        self.inside = 0
        self.most = 0

    @handles(Add)
    async def add(self, message: Add) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        return self.most


class WithAsync(Plain):
    @handles(Work, concurrent=True)
    async def never_called(self, message: Work) -> int:
        await asyncio.sleep(message.seconds)
        return 1

    async def no_handler_at_all(self) -> None:
        await asyncio.sleep(1)


@pytest.mark.parametrize("kind", [Plain, WithAsync])
async def test_an_unused_async_method_changes_nothing(node: Node, kind: type[Plain]) -> None:
    """One `async def` that nobody called changed how all other methods ran (ray#39179, ray#49869)."""
    ref = await start(node, kind())
    assert await asyncio.gather(*(ref.ask(Add(amount=1)) for _ in range(20))) == [1] * 20


class Owner(Actor):
    """Names an actor that a supervisor keeps."""

    def __init__(self, top: Ref) -> None:
        self.top = top

    async def started(self) -> None:
        self.context.node.register("shared", await self.top.ask(AwaitChild(name="c")))

    @handles(Quit)
    async def quit(self, message: Quit) -> None:
        self.context.stop()


async def test_a_named_actor_outlives_who_named_it(node: Node) -> None:
    """A named actor was gone for good when its owner died (marin#1719)."""
    top = await node.spawn(
        ChildSpec(name="top", start=lambda: Supervisor([ChildSpec(name="c", start=Counter)]))
    )
    owner = await start(node, Owner(top), "owner")
    await node.stop(owner)
    first = await node.find("shared")
    assert first is not None
    assert await first.ask(Add(amount=1)) == 1
    await first.tell(Crash())
    second = await top.ask(AwaitChild(name="c", after=first))
    assert await node.find("shared") == second


class Owns(Actor):
    """Owns one that owns one ... that fails."""

    supervision = Supervision(max_restarts=0)

    def __init__(self, depth: int, inside: type[Actor]) -> None:
        self.depth = depth
        self.inside = inside

    async def started(self) -> None:
        spec: Spec = ChildSpec(name="leaf", start=self.inside)
        if self.depth:
            spec = ChildSpec(name="owned", start=lambda: Owns(self.depth - 1, self.inside))
        elif self.inside is Counter:
            spec = ProcessSpec(name="leaf", actor="tests.actors.zoo:Counter", config=CounterConfig())
        ref = await self.context.spawn(spec)
        if not self.depth:
            await ref.tell(Crash(text="it began here"))


class FailsInATask(Actor):
    async def started(self) -> None:
        self.context.run(self.fails())

    async def fails(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("it began here")

    @handles(Crash)
    async def crash(self, message: Crash) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("inside", [Counter, FailsInATask])
async def test_a_failure_passes_every_owner_up_to_the_root(depth: int, inside: type[Actor]) -> None:
    """A failure stopped at its first owner and was lost (monarch PR 1629, monarch PR 1637)."""
    with pytest.raises(NodeFailed) as caught:
        async with asyncio.timeout(30), Node(name="root", supervision=Supervision(max_restarts=0)) as node:
            await node.spawn(ChildSpec(name="top", start=lambda: Owns(depth, inside)))
            await node.failed()
    assert caught.value.reason.first.message == "it began here"
