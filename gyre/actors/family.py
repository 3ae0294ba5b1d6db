"""The children of one actor, or the top-level actors of a node."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from gyre.actors.errors import ExitReason, SpawnFailed
from gyre.actors.log import log
from gyre.actors.messages import Restarted, Tell
from gyre.actors.ref import Ref
from gyre.actors.specs import ProcessSpec, Restart, Spec
from gyre.actors.supervision import Escalate, Forget, RestartChildren, Restarts, Supervision

if TYPE_CHECKING:
    from gyre.actors.life import Life
    from gyre.actors.node import Node

KILL_WAIT_S = 5.0


class Running(Protocol):
    """A life that goes on, in this process or in one of its own. `watched` is known when it has ended:
    whether someone monitored it."""

    ref: Ref
    ended: asyncio.Future[ExitReason]

    watched: bool

    @property
    def path(self) -> str: ...
    def find(self, path: str) -> Ref | None: ...
    def request_stop(self) -> None: ...
    def kill(self) -> None: ...


class Child:
    """A name in a family; `running` is None before the first life is up and between two lives, `begun` the
    life that is not up yet. One that is `unwanted` shall not live again."""

    __slots__ = (
        "begun",
        "incarnation",
        "last",
        "last_exit",
        "running",
        "spec",
        "stopping",
        "unwanted",
        "watched",
    )

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.incarnation = spec.former_lives if isinstance(spec, ProcessSpec) else 0
        self.running: Running | None = None
        self.begun: Running | None = None
        self.stopping = False
        self.unwanted = False
        self.last: Ref | None = None  # its newest life
        self.last_exit: tuple[ExitReason, float] | None = None  # why it ended last, and when
        self.watched = False  # somebody monitored it

    def begins(self, running: Running) -> None:
        self.begun = running

    def restart(self, reason: ExitReason) -> Restart:
        """Nothing can be started where its node is gone."""
        if reason.kind == "lost" and isinstance(self.spec, ProcessSpec) and self.spec.node is not None:
            return "temporary"
        return self.spec.restart


class _End:
    """Called when that life has ended. Each actor has one: a `partial` would take three times the memory."""

    __slots__ = ("_child", "_family", "_running")

    def __init__(self, family: Family, child: Child, running: Running) -> None:
        self._family = family
        self._child = child
        self._running = running

    def __call__(self, ended: asyncio.Future[ExitReason]) -> None:
        self._family.ended(self._child, self._running, ended.result())


class Family:
    """Starts children, learns of their end, does what `supervision` says, one thing at a time."""

    def __init__(
        self,
        node: Node,
        parent: str,
        supervision: Supervision,
        fail: Callable[[ExitReason], None],
        deliver: Callable[[Tell], None],
        owner: Life | None = None,
    ) -> None:
        self._node = node
        self._owner = owner
        self._parent = parent
        self._fail = fail
        self._deliver = deliver
        self._children: dict[str, Child] = {}
        self._restarts = Restarts(supervision)
        self._exits: deque[tuple[Child, Running | None, ExitReason]] = deque()
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False

    async def spawn(self, spec: Spec) -> Ref:
        if self._closing:
            raise SpawnFailed(spec.name, ExitReason(kind="stopped", message=f"{self._parent} is stopping"))
        if spec.name in self._children:
            message = f"{self._parent} has a child of that name"
            raise SpawnFailed(spec.name, ExitReason(kind="error", message=message))
        child = self._children[spec.name] = Child(spec)
        try:
            running = await self._start(child)
        except BaseException:
            self._forget(child)
            raise
        return running.ref

    async def stop(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None:
            child.unwanted = True
            await self._stop(child)
            self._forget(child)

    def lookup(self, path: str) -> Ref | None:
        """The living child of that name, or what lives below it: `child/grandchild`."""
        name, _, rest = path.partition("/")
        child = self._children.get(name)
        if child is None or child.running is None:
            return None
        return child.running.find(rest) if rest else child.running.ref

    @property
    def children(self) -> Mapping[str, Child]:
        """By name, in the order in which they were started."""
        return self._children

    def path_of(self, name: str) -> str:
        return name if self._owner is None else f"{self._owner.path}/{name}"

    async def close(self) -> None:
        """Stops all, the youngest first."""
        self._closing = True
        if self._keeper is not None and not self._keeper.done():
            self._keeper.cancel()
            await asyncio.wait([self._keeper])  # what it starts is undone
        for child in reversed([*self._children.values()]):
            await self._stop(child)
        self._children.clear()

    async def end(self) -> None:
        """Kills all, and waits until they are gone."""
        self.kill()
        ends = [life.ended for life in self._alive()]
        if ends:
            await asyncio.wait(ends, timeout=KILL_WAIT_S)

    def kill(self) -> None:
        """Ends all at once, without asking."""
        self._closing = True
        if self._keeper is not None:
            self._keeper.cancel()
        for child in self._children.values():
            child.stopping = True
        for life in self._alive():
            life.kill()

    def _alive(self) -> list[Running]:
        lives = [life for child in self._children.values() for life in (child.running, child.begun)]
        return [life for life in lives if life is not None and not life.ended.done()]

    async def _start(self, child: Child) -> Running:
        child.incarnation += 1
        child.stopping = False
        try:
            running = await self._node.launch(child.spec, child.incarnation, child.begins, self)
        except SpawnFailed:
            raise
        except Exception as error:  # nothing can listen
            raise SpawnFailed(child.spec.name, ExitReason.of(error)) from error
        finally:
            child.begun = None
        if self._closing or child.unwanted:
            running.kill()
            await asyncio.wait([running.ended], timeout=KILL_WAIT_S)
        if running.ended.done():
            raise SpawnFailed(child.spec.name, running.ended.result())
        child.running = running
        if child.last is not None:
            self._node.neighbours.names.moved(child.last, running.ref)
        child.last = running.ref
        running.ended.add_done_callback(_End(self, child, running), context=self._node.context)
        return running

    async def _stop(self, child: Child) -> None:
        child.stopping = True
        running = child.running
        if child.begun is not None:
            running = child.begun
            running.kill()
        if running is None or running.ended.done():
            return
        running.request_stop()
        await asyncio.wait([running.ended], timeout=child.spec.shutdown_s)
        if not running.ended.done():
            log.warning("actor_killed", actor=running.ref.label, shutdown_s=child.spec.shutdown_s)
            running.kill()
            await asyncio.wait([running.ended], timeout=KILL_WAIT_S)
        if not running.ended.done():
            log.error("actor_would_not_end", actor=running.ref.label)

    def _wanted(self, child: Child) -> bool:
        return not child.unwanted and self._children.get(child.spec.name) is child

    def _forget(self, child: Child) -> None:
        if self._children.get(child.spec.name) is child:
            del self._children[child.spec.name]

    # --- ends that nobody asked for -------------------------------------------------------------

    def ended(self, child: Child, running: Running, reason: ExitReason) -> None:
        """A life of `child` is over."""
        self._node.neighbours.names.ended(running.ref)
        if child.stopping or self._closing or child.running is not running:
            return
        self._exits.append((child, running, reason))
        if self._keeper is None or self._keeper.done():
            self._keeper = self._node.loop.create_task(
                self._keep(), name=f"{self._parent}/supervision", context=self._node.context.copy()
            )

    async def _keep(self) -> None:
        try:
            while self._exits and not self._closing:
                child, running, reason = self._exits.popleft()
                if child.running is running and not child.stopping:
                    await self._handle(child, running, reason)
        except Exception as error:
            self._fail(ExitReason.of(error))

    async def _handle(self, child: Child, running: Running | None, reason: ExitReason) -> None:
        name = child.spec.name
        if self._children.get(name) is not child:
            return  # it was stopped meanwhile
        child.last_exit = (reason, self._node.loop.time())
        if running is not None:
            child.watched = running.watched
        decision = self._restarts.decide(
            name,
            child.restart(reason),
            abnormal=reason.abnormal,
            watched=child.watched,
            order=[*self._children],
            now=self._node.loop.time(),
        )
        label = f"{name}#{child.incarnation}"
        if reason.abnormal:
            log.warning(
                "actor_died", actor=label, parent=self._parent, reason=str(reason), trace=reason.traceback
            )
        match decision:
            case Forget():
                self._forget(child)
            case Escalate(why):
                self._forget(child)
                message = f"its child {label} died: {reason} ({why})"
                self._fail(
                    ExitReason(kind="error", message=message, traceback=reason.traceback, cause=reason)
                )
            case RestartChildren(names, delay_s):
                await self._restart([self._children[name] for name in names], reason, delay_s)

    async def _restart(self, children: list[Child], reason: ExitReason, delay_s: float) -> None:
        before = {child.spec.name: child.running.ref for child in children if child.running is not None}
        for child in reversed(children):
            await self._stop(child)
            child.running = None
            if child.spec.restart == "temporary":
                self._forget(child)
        # Those that died of one cause do not all come back at once.
        await asyncio.sleep(delay_s * (0.5 + self._node.rng.random()))
        for child in children:
            if not self._wanted(child):
                continue
            try:
                running = await self._start(child)
            except SpawnFailed as error:
                if not self._wanted(child):
                    continue
                if child.spec.restart == "transient" and not error.reason.abnormal:
                    self._forget(child)
                    continue
                child.stopping = False
                self._exits.appendleft((child, None, error.reason))
                return
            log.info("actor_restarted", actor=running.ref.label, parent=self._parent)
            old = before.get(child.spec.name, running.ref)
            self._deliver(Restarted(name=child.spec.name, old=old, ref=running.ref, reason=reason))
