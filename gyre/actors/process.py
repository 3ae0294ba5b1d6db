"""A child that is a process: started, watched, stopped, and its end explained."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gyre.actors.errors import ExitReason
from gyre.actors.family import KILL_WAIT_S, Family, Running
from gyre.actors.log import log
from gyre.actors.ref import Ref
from gyre.actors.specs import ProcessSpec
from gyre.actors.wire import Booted, Ended, Frame, Shutdown

if TYPE_CHECKING:
    from gyre.actors.carrier import Carrier
    from gyre.actors.node import Node

# From a closed connection, or a reported end, to the process' own.
LINK_LOST_GRACE_S = 0.1
ENDED_GRACE_S = 2.0
TERM_BEFORE_KILL_S = 1.0


class ChildProcess:
    """One life of a ProcessSpec's actor; `ended` resolves when the process is gone and reaped."""

    def __init__(self, node: Node, spec: ProcessSpec, incarnation: int, home: Family | None = None) -> None:
        self.node = node
        self._home = home
        self.spec = spec
        self.node_id = node.new_node_id()
        self.ended: asyncio.Future[ExitReason] = node.loop.create_future()
        self.watched = False
        # Until it has booted nobody sees this Ref.
        self.ref = self._ref("", 0, incarnation)
        self._booted: asyncio.Future[None] = node.loop.create_future()
        self._carrier: Carrier | None = None
        self._reported: ExitReason | None = None
        self._asked_to_stop = False
        self._timers: list[asyncio.TimerHandle] = []

    async def start(self) -> None:
        """Returns when its actor has started, or `ended` says why not."""
        try:
            await self._begin()
        except asyncio.CancelledError:
            self._never_was(ExitReason(kind="stopped"))
            raise
        except Exception as error:  # no descriptor is left, the disk is full, its config cannot travel
            self._never_was(ExitReason(kind="stopped") if self._asked_to_stop else ExitReason.of(error))
            return
        try:
            await self._until_booted()
            await self.node.probes.process_began(self)
        except asyncio.CancelledError:
            self.kill()
            await asyncio.wait([self.ended], timeout=KILL_WAIT_S)
            raise

    def _never_was(self, reason: ExitReason) -> None:
        self.node.processes.forget(self)
        self.ended.set_result(reason)

    async def _begin(self) -> None:
        boot = self.node.boot(self.spec, self.node_id, self.ref.incarnation)
        self._carrier = self.node.carrier(self.node, self.spec)
        await self._carrier.start(boot, self._ended)
        log.info("process_started", actor=self.ref.label, pid=self._carrier.pid)

    async def _until_booted(self) -> None:
        either: list[asyncio.Future[Any]] = [self._booted, self.ended]
        await asyncio.wait(either, timeout=self.spec.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not any(future.done() for future in either):
            self._reported = ExitReason(
                kind="error", message=f"its actor had not started after {self.spec.start_timeout_s:g} s"
            )
            self._signal(signal.SIGKILL)
        if self._reported is not None and not self.ended.done():
            self._signal_after(ENDED_GRACE_S, signal.SIGKILL)
            await asyncio.wait([self.ended])

    def _signal(self, number: signal.Signals) -> None:
        if self._carrier is not None:
            self._carrier.signal(number)

    def _signal_after(self, delay_s: float, number: signal.Signals) -> None:
        self._timers.append(self.node.loop.call_later(delay_s, self._signal, number))

    def _ref(self, endpoint: str, id: int, incarnation: int) -> Ref:
        return Ref(self.node_id, endpoint, id, self.spec.name, incarnation, self.node.remote)

    # --- what the child says --------------------------------------------------------------------

    def received(self, frame: Frame) -> None:
        match frame:
            case Booted(reason=None):
                self.ref = self._ref(frame.endpoint, frame.id, self.ref.incarnation)
            case Booted():
                self._reported = frame.reason
            case Ended():
                self._reported = frame.reason
                self._signal_after(ENDED_GRACE_S, signal.SIGKILL)
            case _:
                return
        if not self._booted.done():
            self._booted.set_result(None)

    def link_lost(self) -> None:
        """It ended, or it will: a child without its parent is of no use."""
        self._timers.append(self.node.loop.call_later(LINK_LOST_GRACE_S, self._outlives_its_link))

    def _outlives_its_link(self) -> None:
        if self._reported is None:
            self._signal(signal.SIGKILL)
        else:
            self._over(self._reported)  # what it still does on its way out concerns nobody

    # --- what the parent wants ------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self.spec.name if self._home is None else self._home.path_of(self.spec.name)

    def find(self, path: str) -> Ref | None:
        """What lives in another process is its own node's to know."""
        return None

    def request_stop(self) -> None:
        """A message first, SIGTERM a little before the time is over."""
        self._asked_to_stop = True
        link = self.node.links.get(self.node_id)
        if link is not None:
            link.send(Shutdown(0))
        until_term_s = max(self.spec.shutdown_s - TERM_BEFORE_KILL_S, self.spec.shutdown_s / 2)
        self._signal_after(until_term_s, signal.SIGTERM)

    def kill(self) -> None:
        self._asked_to_stop = True
        self._signal(signal.SIGKILL)

    # --- its end --------------------------------------------------------------------------------

    def _ended(self, code: int | None, tail: tuple[str, ...]) -> None:
        for timer in self._timers:
            timer.cancel()
        reason = self._reason(code, tail)
        pid = self._carrier.pid if self._carrier is not None else 0
        log.info("process_ended", actor=self.ref.label, pid=pid, reason=str(reason))
        self.node.processes.forget(self)
        self._over(reason)
        self.ended.set_result(reason)

    def _over(self, reason: ExitReason) -> None:
        """Tells all who wait for it."""
        link = self.node.links.get(self.node_id)
        self.watched = self.watched or (link is not None and link.watches(self.ref.id))
        self.node.links.peer_over(self.node_id, reason)

    def _reason(self, code: int | None, tail: tuple[str, ...]) -> ExitReason:
        if self._reported is not None:
            reason = self._reported
        else:
            reason = ExitReason(kind="stopped" if self._asked_to_stop else "exit")
        return msgspec.structs.replace(
            reason,
            exit_code=code if code is not None and code >= 0 else None,
            signal=_signal_name(code),
            stderr_tail=tail if reason.abnormal else (),
        )


def _signal_name(code: int | None) -> str | None:
    return signal.Signals(-code).name if code is not None and code < 0 else None


class Process(Running, Protocol):
    """A child process, of this machine or another."""

    @property
    def node_id(self) -> str: ...
    def received(self, frame: Frame) -> None: ...
    def link_lost(self) -> None: ...


class Processes:
    """The child processes of a node, by the node each of them is."""

    def __init__(self) -> None:
        self._by_node: dict[str, Process] = {}
        self.parent: Parent | None = None

    def add(self, process: Process) -> None:
        self._by_node[process.node_id] = process

    def forget(self, process: Process) -> None:
        self._by_node.pop(process.node_id, None)

    def all(self) -> list[Process]:
        return [*self._by_node.values()]

    def received(self, node_id: str, frame: Frame) -> None:
        process = self._by_node.get(node_id)
        if process is not None:
            process.received(frame)
        elif self.parent is not None and node_id == self.parent.node_id and isinstance(frame, Shutdown):
            self.parent.wants_stop()

    def watched(self, node_id: str, actor_id: int) -> None:
        """The end of that actor has been told to those who monitor it; its process' end follows."""
        process = self._by_node.get(node_id)
        if process is not None and process.ref.id == actor_id:
            process.watched = True

    def link_lost(self, node_id: str) -> bool:
        """Whether the end of that peer's process will be known, and so the reason."""
        process = self._by_node.get(node_id)
        if process is not None:
            process.link_lost()
            return True
        if self.parent is not None and node_id == self.parent.node_id:
            self.parent.lost()
        return False


class Parent:
    """The parent, as a child process sees it."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._stop = asyncio.Event()
        self._life: Running | None = None

    def wants_stop(self) -> None:
        self._stop.set()

    def lost(self) -> None:
        self._stop.set()

    def terminate(self) -> None:
        """SIGTERM: the first asks it to stop, the next ends what does not."""
        if self._stop.is_set() and self._life is not None:
            self._life.kill()
        self._stop.set()

    async def outlive(self, life: Running, shutdown_s: float) -> ExitReason:
        """Until the life ends, or the stop that the parent wants has ended it."""
        stop = asyncio.ensure_future(self._stop.wait())
        either: list[asyncio.Future[Any]] = [life.ended, stop]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not life.ended.done():
            self._life = life
            life.request_stop()
            await asyncio.wait([life.ended], timeout=shutdown_s)
            life.kill()
            await asyncio.wait([life.ended])
        return life.ended.result()
