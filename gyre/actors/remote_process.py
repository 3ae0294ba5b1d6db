"""A child that is a process of another node's machine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from gyre.actors.desk import EndProcess, ProcessOver, ProcessUp, RunProcess
from gyre.actors.errors import ActorDied, ActorError, ExitReason
from gyre.actors.log import log
from gyre.actors.ref import Ref
from gyre.actors.specs import ProcessSpec
from gyre.actors.wire import TELL, Frame

if TYPE_CHECKING:
    from gyre.actors.family import Family
    from gyre.actors.node import Node

# From a lost connection to it to the word of its node.
LINK_LOST_GRACE_S = 1.0


class RemoteProcess:
    """One life of a ProcessSpec's actor where `spec.node` is. That node runs it, watches it and says how it
    ends; with the connection to that node the life counts as over."""

    def __init__(self, node: Node, spec: ProcessSpec, incarnation: int, home: Family | None = None) -> None:
        assert spec.node is not None
        self.node = node
        self._home = home
        self.spec = spec
        self.host = spec.node
        self.ended: asyncio.Future[ExitReason] = node.loop.create_future()
        self.watched = False
        # Until it is up nobody sees this Ref.
        self.ref = Ref("", "", 0, spec.name, incarnation, node.remote)
        self._key = node.new_id()
        self._up: asyncio.Future[None] = node.loop.create_future()
        self._following: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def node_id(self) -> str:
        return self.ref.node_id

    async def start(self) -> None:
        """Returns when its actor has started, or `ended` says why not."""
        self._following = self.node.loop.create_task(
            self._follow(), name=f"{self.ref.label} at {self.host.name}", context=self.node.context.copy()
        )
        either: list[asyncio.Future[Any]] = [self._up, self.ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await self.node.probes.process_began(self)
        except asyncio.CancelledError:
            self._following.cancel()
            raise

    async def _follow(self) -> None:
        try:
            async with aclosing(self.host.stream(self._request())) as events:
                async for event in events:
                    match event:
                        case ProcessUp(ref):
                            self._is_up(ref)
                        case ProcessOver(reason):
                            self._over(reason)
                            return
            raise LookupError(f"{self.host.name} does not say how it ended")
        except ActorDied as error:
            message = f"its node {self.host.name} is gone"
            self._over(ExitReason(kind="lost", message=message, cause=error.reason))
        except (ActorError, LookupError) as error:
            self._over(ExitReason.of(error))
        except asyncio.CancelledError:
            self._over(ExitReason(kind="stopped", message="this node is closed"))
            raise

    def _request(self) -> RunProcess:
        spec = self.spec
        return RunProcess(
            key=self._key,
            name=spec.name,
            incarnation=self.ref.incarnation,
            actor=spec.actor,
            config=self.node.codec.encode_whole(spec.config),
            environment={**spec.environment},
            log_path=spec.log_path,
            shutdown_s=spec.shutdown_s,
            start_timeout_s=spec.start_timeout_s,
            mailbox=spec.mailbox,
            fork=spec.fork,
        )

    def _is_up(self, ref: Ref) -> None:
        self.ref = ref
        self.node.processes.add(self)
        log.info("process_started", actor=ref.label, node=self.host.name)
        self._up.set_result(None)

    # --- what a link and the parent want ----------------------------------------------------------

    def received(self, frame: Frame) -> None:
        """What a child process says, it says to its own parent."""

    def link_lost(self) -> None:
        """Its node will say why; one that cannot be talked to is of no use."""
        self._timer = self.node.loop.call_later(LINK_LOST_GRACE_S, self.kill)

    @property
    def path(self) -> str:
        return self.spec.name if self._home is None else self._home.path_of(self.spec.name)

    def find(self, path: str) -> Ref | None:
        return None

    def request_stop(self) -> None:
        self._tell(EndProcess(key=self._key, kill=False))

    def kill(self) -> None:
        self._tell(EndProcess(key=self._key, kill=True))

    def _tell(self, message: EndProcess) -> None:
        link = self.node.links.get(self.host.node_id)
        if link is not None:
            link.request(TELL, self.node.new_id(), self.host, message, None, None)

    # --- its end ----------------------------------------------------------------------------------

    def _over(self, reason: ExitReason) -> None:
        if self._timer is not None:
            self._timer.cancel()
        log.info("process_ended", actor=self.ref.label, node=self.host.name, reason=str(reason))
        if self._up.done():
            link = self.node.links.get(self.node_id)
            self.watched = self.watched or (link is not None and link.watches(self.ref.id))
            self.node.processes.forget(self)
            self.node.links.peer_over(self.node_id, reason)
        self.ended.set_result(reason)
