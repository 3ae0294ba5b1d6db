"""What a node does for others: the actor that every node has, under an id that all know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gyre.actors.actor import Actor
from gyre.actors.errors import ExitReason, SpawnFailed
from gyre.actors.handlers import handles
from gyre.actors.looking.inspector import Inspector
from gyre.actors.looking.messages import Inspect, Trace
from gyre.actors.looking.reports import ActorReport, Traced
from gyre.actors.looking.tracer import traced
from gyre.actors.messages import Ask, Stream, Tell
from gyre.actors.ref import Ref
from gyre.actors.specs import ProcessSpec

if TYPE_CHECKING:
    from gyre.actors.family import Running

FIND_TIMEOUT_S = 10.0


class Meet(Ask[None], frozen=True, kw_only=True):
    """This node has reached you; names are looked up there too."""

    node: Ref


class Find(Ask[Ref | None], frozen=True, kw_only=True):
    """The actor of that name, here or at a node that this one knows and that is not in `seen`."""

    name: str
    seen: tuple[str, ...] = ()


class ProcessUp(msgspec.Struct, frozen=True, tag=True):
    """Its actor has started."""

    ref: Ref


class ProcessOver(msgspec.Struct, frozen=True, tag=True):
    """The process is gone, or never was."""

    reason: ExitReason


class RunProcess(Stream[ProcessUp | ProcessOver], frozen=True, kw_only=True):
    """A process of this machine for who asks. It is stopped when the stream is closed, or the asker's node
    gone. `config` is encoded."""

    key: int
    name: str
    incarnation: int
    actor: str
    config: bytes
    environment: dict[str, str]
    log_path: Path | None
    shutdown_s: float
    start_timeout_s: float
    mailbox: int
    fork: bool


class EndProcess(Tell, frozen=True, kw_only=True):
    """Stop what was run under `key`, or kill it; its stream says how it ended."""

    key: int
    kill: bool


class Desk(Actor):
    """Answers to nodes that hold the token, so it does what they say."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}

    @handles(Meet, concurrent=True)
    async def meet(self, message: Meet) -> None:
        self.context.node.neighbours.meet(message.node)

    @handles(Find, concurrent=True)
    async def find(self, message: Find) -> Ref | None:
        return await self.context.node.neighbours.find(message.name, message.seen)

    @handles(RunProcess)
    async def run_process(self, message: RunProcess) -> AsyncIterator[ProcessUp | ProcessOver]:
        try:
            running = await self.context.node.launch(_spec(message), message.incarnation)
        except SpawnFailed as error:
            yield ProcessOver(error.reason)
            return
        self._running[message.key] = running
        try:
            if not running.ended.done():
                yield ProcessUp(running.ref)
            yield ProcessOver(await asyncio.shield(running.ended))
        finally:
            del self._running[message.key]
            await _end(running, message.shutdown_s)

    @handles(EndProcess, concurrent=True)
    async def end_process(self, message: EndProcess) -> None:
        running = self._running.get(message.key)
        if running is not None:
            running.kill() if message.kill else running.request_stop()

    @handles(Inspect, concurrent=True)
    async def inspect(self, message: Inspect) -> ActorReport:
        return await Inspector(self.context.node, message).report()

    @handles(Trace)
    async def trace(self, message: Trace) -> AsyncIterator[Traced]:
        async with aclosing(traced(self.context.node, message, self.context.run)) as messages:
            async for one in messages:
                yield one


def _spec(message: RunProcess) -> ProcessSpec:
    try:
        return ProcessSpec(
            name=message.name,
            actor=message.actor,
            config=msgspec.Raw(message.config),
            environment=message.environment,
            log_path=message.log_path,
            shutdown_s=message.shutdown_s,
            start_timeout_s=message.start_timeout_s,
            mailbox=message.mailbox,
            fork=message.fork,
        )
    except ValueError as error:
        raise SpawnFailed(message.name, ExitReason.of(error)) from error


async def _end(running: Running, shutdown_s: float) -> None:
    """Nobody wants it any more."""
    if running.ended.done():
        return
    running.request_stop()
    try:
        await asyncio.wait([running.ended], timeout=shutdown_s)
    finally:
        running.kill()
