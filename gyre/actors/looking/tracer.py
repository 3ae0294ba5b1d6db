"""The messages of a node's actors and of those in its child processes, as they are handled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gyre.actors.errors import ActorError
from gyre.actors.life import Life
from gyre.actors.log import log
from gyre.actors.looking.messages import Trace
from gyre.actors.looking.reports import Traced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gyre.actors.family import Child, Running
    from gyre.actors.node import Node

# Of those that the consumer has not taken yet; what comes then is lost, and counted.
WAITING = 10_000


class Run(Protocol):
    def __call__(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]: ...


async def traced(node: Node, message: Trace, run: Run) -> AsyncGenerator[Traced, None]:
    """Until it is closed. `run` starts a task of who serves the trace."""
    tracer = _Tracer(node, message, run)
    with ExitStack() as stack:
        stack.callback(tracer.close)
        stack.enter_context(node.probes.trace(tracer.take))
        stack.enter_context(node.probes.following(tracer.follow))
        tracer.follow_all()
        while True:
            yield await tracer.queue.get()


class _Tracer:
    def __init__(self, node: Node, message: Trace, run: Run) -> None:
        self._node = node
        self._message = message
        self._run = run
        self.queue: asyncio.Queue[Traced] = asyncio.Queue(WAITING)
        self._lost = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # The life where the path begins is the only one of a child process without a home.
        life = node.life(message.life) if message.life else None
        self._top = life.path if life is not None else ""

    def take(self, one: Traced) -> None:
        """One of this node."""
        path = self._below_top(one.actor)
        if path is None or not _under(path, self._message.path):
            return
        if self.queue.full():
            self._lost += 1
            return
        actor = _join(self._message.under, path)
        self.queue.put_nowait(msgspec.structs.replace(one, actor=actor, lost=self._lost))
        self._lost = 0

    def follow_all(self) -> None:
        for process in _processes(self._node.family.children):
            self.follow(process)
        for life in [*self._node.lives.values()]:
            if life.home is None:
                for process in _processes(life.children):
                    self.follow(process)

    def follow(self, process: Running) -> None:
        """From now on what happens in that process is told too, where it is below the path."""
        path = self._below_top(process.path)
        wanted = self._message.path
        if path is None or process.ref.node_id in self._tasks:
            return
        if _under(path, wanted):
            rest = ""
        elif _under(wanted, path):
            rest = wanted[len(path) + 1 :]
        else:
            return
        message = Trace(path=rest, life=process.ref.id, under=_join(self._message.under, path))
        task = self._run(self._pump(process, message), name=f"trace {path}")
        self._tasks[process.ref.node_id] = task

    async def _pump(self, process: Running, message: Trace) -> None:
        try:
            async with aclosing(self._node.desk(process.ref).stream(message)) as items:
                async for one in items:
                    await self.queue.put(one)
        except ActorError as error:
            log.info("trace_ended", actor=process.ref.label, reason=str(error))

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _below_top(self, path: str) -> str | None:
        """Without the part up to the life where the path begins; None where it is not below it."""
        if not self._top:
            return path
        if path == self._top:
            return ""
        return path[len(self._top) + 1 :] if _under(path, self._top) else None


def _processes(children: Mapping[str, Child]) -> Iterator[Running]:
    for child in children.values():
        if isinstance(child.running, Life):
            yield from _processes(child.running.children)
        elif child.running is not None:
            yield child.running


def _under(path: str, top: str) -> bool:
    return not top or path == top or path.startswith(f"{top}/")


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name
