"""Actors that the tests start, in this process and in others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from gyre.actors import (
    Actor,
    Ask,
    Down,
    ProcessSpec,
    Ref,
    Stream,
    Tell,
    WireError,
    handles,
    register_error,
)


class CounterConfig(msgspec.Struct, frozen=True, kw_only=True):
    start: int = 0
    peer: Ref | None = None
    folder: Path | None = None


class Add(Ask[int], frozen=True, kw_only=True):
    amount: int


class AddToPeer(Ask[int], frozen=True, kw_only=True):
    amount: int


class Bump(Tell, frozen=True, kw_only=True):
    amount: int = 1


class Total(Ask[int], frozen=True, kw_only=True):
    """Answered at once, whatever else is being handled."""


class Incarnation(Ask[int], frozen=True, kw_only=True):
    pass


class Count(Stream[int], frozen=True, kw_only=True):
    upto: int
    fail_at: int = -1


class Fail(Ask[None], frozen=True, kw_only=True):
    text: str


class Crash(Tell, frozen=True, kw_only=True):
    text: str = "crash"


class Quit(Tell, frozen=True, kw_only=True):
    """Stop yourself."""


class Hang(Ask[None], frozen=True, kw_only=True):
    """Handled for ever."""


class Pid(Ask[int], frozen=True, kw_only=True):
    pass


class Unheard(Ask[None], frozen=True, kw_only=True):
    """Nobody handles it."""


class Counter(Actor):
    """Counts, and keeps what happened to it in `seen`."""

    def __init__(self, config: CounterConfig = CounterConfig()) -> None:  # noqa: B008  frozen
        self.total = config.start
        self.peer = config.peer
        self.folder = config.folder
        self.seen: list[str] = []
        self.hanging = asyncio.Event()
        self.producing = asyncio.Event()
        self.produced = 0

    async def stopping(self) -> None:
        self.seen.append("stopping")

    @handles(Add)
    async def add(self, message: Add) -> int:
        self.total += message.amount
        return self.total

    @handles(AddToPeer)
    async def add_to_peer(self, message: AddToPeer) -> int:
        assert self.peer is not None
        return await self.peer.ask(Add(amount=message.amount))

    @handles(Bump)
    async def bump(self, message: Bump) -> None:
        self.total += message.amount
        self.seen.append(f"bump {message.amount}")

    @handles(Total, concurrent=True)
    async def get_total(self, message: Total) -> int:
        return self.total

    @handles(Incarnation, concurrent=True)
    async def get_incarnation(self, message: Incarnation) -> int:
        return self.context.incarnation

    @handles(Count)
    async def count(self, message: Count) -> AsyncIterator[int]:
        try:
            for i in range(message.upto):
                if i == message.fail_at:
                    raise ValueError(f"at {i}")
                self.produced += 1
                self.producing.set()
                yield i
            self.seen.append("counted")
        finally:
            self.seen.append("count closed")
            self.hanging.set()

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise ValueError(message.text)

    @handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise ValueError(message.text)

    @handles(Quit)
    async def quit(self, message: Quit) -> None:
        self.context.stop()

    @handles(Hang)
    async def hang(self, message: Hang) -> None:
        self.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.seen.append("hang ended")

    @handles(Pid, concurrent=True)
    async def pid(self, message: Pid) -> int:
        return os.getpid()


class Observe(Tell, frozen=True, kw_only=True):
    ref: Ref


class Observed(Ask[tuple[Down, ...]], frozen=True, kw_only=True):
    """The Downs that came, when there are as many."""

    count: int


class Observer(Actor):
    """Monitors what it is told to."""

    def __init__(self) -> None:
        self.downs: list[Down] = []
        self.more = asyncio.Condition()

    @handles(Observe)
    async def observe(self, message: Observe) -> None:
        self.context.monitor(message.ref)

    @handles(Down)
    async def down(self, message: Down) -> None:
        self.downs.append(message)
        async with self.more:
            self.more.notify_all()

    @handles(Observed, concurrent=True)
    async def observed(self, message: Observed) -> tuple[Down, ...]:
        async with self.more:
            await self.more.wait_for(lambda: len(self.downs) >= message.count)
        return tuple(self.downs)


class Circle(Tell, frozen=True, kw_only=True):
    """Whom to ask when asked."""

    next: Ref


class GoRound(Ask[str], frozen=True, kw_only=True):
    pass


class GoRoundAside(Ask[str], frozen=True, kw_only=True):
    """As GoRound, handled concurrently."""


class Dancer(Actor):
    """Answers by asking the next; what that raises is its answer."""

    def __init__(self) -> None:
        self.next: Ref | None = None

    @handles(Circle)
    async def circle(self, message: Circle) -> None:
        self.next = message.next

    @handles(GoRound)
    async def go_round(self, message: GoRound) -> str:
        return "alone" if self.next is None else await self.next.ask(GoRound())

    @handles(GoRoundAside, concurrent=True)
    async def go_round_aside(self, message: GoRoundAside) -> str:
        return "aside" if self.next is None else await self.next.ask(GoRound())


class Overflow(WireError):
    """Known on both sides."""

    def __init__(self, tokens: int, window: int) -> None:
        super().__init__(f"{tokens} > {window}")
        self.tokens = tokens
        self.window = window


@register_error
class Asleep(RuntimeError):
    """An error that does not derive from the runtime's."""


class Cat(msgspec.Struct, frozen=True, tag=True):
    lives: int
    owner: Ref | None = None


class Dog(msgspec.Struct, frozen=True, tag=True):
    name: str


class Pet(Ask[Cat | Dog | None], frozen=True, kw_only=True):
    which: str
    owner: Ref | None = None
    data: bytes = b""
    path: Path = Path()
    sizes: dict[str, tuple[int, ...]] = {}


class Raise(Ask[None], frozen=True, kw_only=True):
    which: str


class Wrong(Ask[int], frozen=True, kw_only=True):
    """Answered with what is no int."""


class Shop(Actor):
    """Types of all sorts."""

    @handles(Pet)
    async def pet(self, message: Pet) -> Cat | Dog | None:
        match message.which:
            case "cat":
                return Cat(lives=9, owner=message.owner)
            case "dog":
                return Dog(name=f"{message.path} {message.data!r} {message.sizes}")
        return None

    @handles(Raise)
    async def oops(self, message: Raise) -> None:
        match message.which:
            case "overflow":
                raise Overflow(9, 8)
            case "asleep":
                raise Asleep("zzz")
        raise KeyError("other")

    @handles(Wrong)
    async def wrong(self, message: Wrong) -> int:
        return "seven"  # type: ignore[return-value]


class Hold(Tell, frozen=True, kw_only=True):
    """Wait for `Release` before the next message."""


class Release(Tell, frozen=True, kw_only=True):
    pass


class Slow(Actor):
    """Handles a Hold until a Release comes, which is handled at once."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.bumps = 0

    @handles(Hold)
    async def hold(self, message: Hold) -> None:
        await self.gate.wait()

    @handles(Release, concurrent=True)
    async def release(self, message: Release) -> None:
        self.gate.set()

    @handles(Bump)
    async def bump(self, message: Bump) -> None:
        self.bumps += 1

    @handles(Total)
    async def total(self, message: Total) -> int:
        return self.bumps


class NestConfig(msgspec.Struct, frozen=True, kw_only=True):
    inner: str = "tests.actors.zoo:Counter"
    fork: bool = False


class Nestlings(Ask[tuple[int, ...]], frozen=True, kw_only=True):
    pass


class Nest(Actor):
    """A process that has a process and a plain subprocess."""

    def __init__(self, config: NestConfig) -> None:
        self.config = config
        self.pids: tuple[int, ...] = ()

    async def started(self) -> None:
        fork = self.config.fork
        spec = ProcessSpec(name="inner", actor=self.config.inner, config=CounterConfig(), fork=fork)
        self.inner = inner = await self.context.spawn(spec)
        loose = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # noqa: ASYNC220
        self.pids = (os.getpid(), await inner.ask(Pid()), loose.pid)

    @handles(Add)
    async def add(self, message: Add) -> int:
        return await self.inner.ask(message)

    @handles(Nestlings)
    async def nestlings(self, message: Nestlings) -> tuple[int, ...]:
        return self.pids


class Stubborn(Actor):
    """Does not stop when asked to."""

    def __init__(self, config: CounterConfig) -> None:
        self.config = config

    async def stopping(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    @handles(Pid)
    async def pid(self, message: Pid) -> int:
        return os.getpid()


class Talker(Actor):
    """Prints, then does as it is told."""

    def __init__(self, config: CounterConfig) -> None:
        self.config = config

    async def started(self) -> None:
        sys.stderr.write("first line\nthe last words\n")
        sys.stderr.flush()
        if self.config.start == 1:
            raise ValueError("no start today")
        if self.config.start == 2:
            os._exit(7)
        if self.config.start == 3:
            await asyncio.Event().wait()

    @handles(Crash)
    async def crash(self, message: Crash) -> None:
        raise ValueError(message.text)

    @handles(Hang)
    async def hang(self, message: Hang) -> None:
        os._exit(9)


class GetEnv(Ask[str | None], frozen=True, kw_only=True):
    name: str


class Environ(Actor):
    """Tells of its environment."""

    def __init__(self, config: CounterConfig) -> None:
        self.config = config

    @handles(GetEnv)
    async def get_env(self, message: GetEnv) -> str | None:
        return os.environ.get(message.name)


class Look(Ask[Ref | None], frozen=True, kw_only=True):
    name: str


class Finder(Actor):
    """Looks names up from where it is."""

    @handles(Look, concurrent=True)
    async def look(self, message: Look) -> Ref | None:
        return await self.context.node.find(message.name)
