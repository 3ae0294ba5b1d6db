"""Complaints of programs that do not end, and of actors that do not stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from gyre.actors import (
    Actor,
    ActorDied,
    ChildSpec,
    Down,
    Node,
    Ref,
    SpawnFailed,
    Tell,
    handles,
)
from tests.actors.conftest import life, start
from tests.actors.test_links import TOKEN, carry
from tests.actors.test_process import gone
from tests.actors.zoo import Add, Count, Counter, Hold, Quit, Slow, Total

PROGRAM = """
import asyncio, signal, sys
from gyre.actors import ChildSpec, Node, ProcessSpec, run
from tests.actors.zoo import Counter, CounterConfig, Hang, Pid

async def main():
    async with Node(name="program") as node:
        await node.spawn(ChildSpec(name="here", start=Counter))
        spec = ProcessSpec(name="there", actor="tests.actors.zoo:Counter", config=CounterConfig())
        there = await node.spawn(spec)
        print("child", await there.ask(Pid()), flush=True)
        await there.ask(Hang(), timeout_s=600)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
if sys.argv[1] == "uvloop":
    run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
async def test_one_interrupt_ends_everything_soon(loop: str) -> None:
    """Ctrl-C had to be pressed again and again, each actor shut by hand (torchforge#360, torchforge#500)."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, loop),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(45):
            assert program.stdout is not None
            while not (line := await program.stdout.readline()).startswith(b"child"):
                assert line
            child = int(line.split()[1])
            program.send_signal(signal.SIGINT)
            _, errors = await program.communicate()
    finally:
        if program.returncode is None:
            os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode not in (0, None)
    assert b"KeyboardInterrupt" in errors
    assert await gone(child)


async def test_a_remote_stream_dropped_after_the_end_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping a remote generator after the shutdown raised, and the process hung (inference#1044)."""
    unraisable: list[object] = []
    gc.collect()  # of earlier tests
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    async with Node(name="a", token=TOKEN) as a, Node(name="b", token=TOKEN) as b:
        await a.listen()
        await b.listen()
        ref = carry(await start(b, Counter()), b, a)
        streams = [ref.stream(Count(upto=1000)) for _ in range(3)]
        for items in streams:
            assert await anext(items) == 0
    with pytest.raises(ActorDied):
        async for _ in streams[0]:
            pass
    await streams[1].aclose()
    del streams, items
    gc.collect()
    assert unraisable == []


async def test_stopping_oneself_at_the_start_does_not_hang(node: Node) -> None:
    """An actor that stopped itself in its start hook waited for itself (pykka#76)."""

    class Shy(Actor):
        async def started(self) -> None:
            self.context.stop()

    async with asyncio.timeout(20):
        with pytest.raises(SpawnFailed, match="normal"):
            await node.spawn(ChildSpec(name="shy", start=Shy))
    assert node.lives == {}


async def asked_while_busy(node: Node) -> tuple[Slow, Ref, list[asyncio.Task[int]]]:
    slow = Slow()
    ref = await start(node, slow)
    await ref.tell(Hold())
    asked = [asyncio.ensure_future(ref.ask(Total())) for _ in range(5)]
    for _ in range(3):
        await asyncio.sleep(0)
    return slow, ref, asked


async def test_stopped_now_answers_what_waits_with_an_error(node: Node) -> None:
    """Asks left in the inbox of a stopped actor were never answered (pykka#46, pykka PR 23)."""
    slow, ref, asked = await asked_while_busy(node)
    stopping = asyncio.ensure_future(node.stop(ref))
    await asyncio.sleep(0)
    slow.gate.set()
    async with asyncio.timeout(20):
        await asyncio.wait(asked)
        await stopping
    assert all(isinstance(ask.exception(), ActorDied) for ask in asked)


class Stoppable(Slow):
    @handles(Quit)
    async def quit(self, message: Quit) -> None:
        self.context.stop()


async def test_a_drained_actor_answers_what_waits(node: Node) -> None:
    """The other way to stop: after all that came before (pykka#47)."""
    stoppable = Stoppable()
    ref = await start(node, stoppable)
    await ref.tell(Hold())
    before = [asyncio.ensure_future(ref.ask(Total())) for _ in range(5)]
    await asyncio.sleep(0)
    await ref.tell(Quit())
    after = asyncio.ensure_future(ref.ask(Total()))
    await asyncio.sleep(0)
    stoppable.gate.set()
    async with asyncio.timeout(20):
        assert await asyncio.gather(*before) == [0] * 5
        with pytest.raises(ActorDied, match="normal"):
            await after


class Note(Tell, frozen=True, kw_only=True):
    pass


class SlowStart(Actor):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.seen: list[str] = []

    async def started(self) -> None:
        await self.gate.wait()

    @handles(Note)
    async def note(self, message: Note) -> None:
        self.seen.append("note")

    @handles(Down)
    async def down(self, message: Down) -> None:
        self.seen.append("down")

    @handles(Add)
    async def add(self, message: Add) -> int:
        return message.amount


@pytest.mark.parametrize("end", ["goes on", "is stopped"])
async def test_a_small_mailbox_full_before_the_start_is_over_blocks_nothing(node: Node, end: str) -> None:
    """Signals to start and stop went through the user's queue: a full one was a deadlock (kameo PR 84)."""
    actor = SlowStart()
    gone = await start(node, Counter(), "gone")
    spawning = asyncio.ensure_future(start(node, actor, mailbox=1))
    await asyncio.sleep(0.01)
    ref = actor.context.ref
    writers = [asyncio.ensure_future(ref.tell(Note(), timeout_s=5.0)) for _ in range(5)]
    await asyncio.sleep(0.01)
    actor.context.monitor(gone)
    await node.stop(gone)
    async with asyncio.timeout(20):
        if end == "is stopped":
            life(ref).request_stop()
            actor.gate.set()
            await asyncio.wait(writers)
            await asyncio.wait([spawning])
            assert life(ref).ended.done()
            return
        actor.gate.set()
        await asyncio.gather(*writers)
        assert await (await spawning).ask(Add(amount=3)) == 3
    assert actor.seen == ["down", *["note"] * 5]
