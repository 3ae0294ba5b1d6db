"""One process' actors, and its way to those of others."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from gyre.actors.boot import Boot
from gyre.actors.deadletters import DeadLetters
from gyre.actors.deadlines import Deadlines
from gyre.actors.errors import ExitReason, NodeFailed, SpawnFailed
from gyre.actors.family import Family, Running
from gyre.actors.handshake import Peer
from gyre.actors.life import Life
from gyre.actors.links import Links
from gyre.actors.log import log
from gyre.actors.messages import Tell
from gyre.actors.process import ChildProcess, Processes
from gyre.actors.ref import Ref, Target
from gyre.actors.remote import Nowhere, RemoteTarget
from gyre.actors.specs import ProcessSpec, Spec
from gyre.actors.supervision import Supervision
from gyre.actors.transport import Listener, TransportName, listen
from gyre.actors.wire import Codec

EXITS_KEPT = 1024
REAP_WAIT_S = 5.0


class Node:
    """`async with Node(name) as node`: on leaving, all actors are stopped, the youngest first, and no
    process, socket or task is left. A top-level actor whose failure nobody handles cancels the body, and
    NodeFailed is raised from it.

    Nothing listens until a child process is spawned or `listen` is called; then on a unix socket in a
    private folder, or on TCP at `host`. Peers must hold the same `token`.
    """

    def __init__(
        self,
        name: str,
        *,
        transport: TransportName = "unix",
        host: str = "127.0.0.1",
        folder: Path | None = None,
        token: bytes | None = None,
        node_id: str | None = None,
        supervision: Supervision | None = None,
    ) -> None:
        self.name = name
        self.id = node_id or self.new_node_id()
        self.token = token or secrets.token_bytes(32)
        self.transport = transport
        self.host = host
        self.lives: dict[int, Life] = {}
        self.dead_letters = DeadLetters(name)
        self.processes = Processes()
        self.remote = RemoteTarget(self)
        self.codec = Codec(self.id, lambda: self.endpoint, self.bind)
        self.links = Links(self)
        self._folder = folder
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        self._listener: Listener | None = None
        self._listening = asyncio.Lock()
        self._exits: dict[int, ExitReason] = {}
        # Ids of messages and lives: unique over the nodes of a job without a word between them.
        self.new_id: Callable[[], int] = itertools.count((secrets.randbits(30) << 32) + 1).__next__
        self._family = Family(self, name, supervision or Supervision(), self._fail, _ignore)
        self._failed: NodeFailed | None = None
        self._owner: asyncio.Task[object] | None = None
        self._in_body = False

    # --- the public face ------------------------------------------------------------------------

    async def spawn(self, spec: Spec) -> Ref:
        """Starts a top-level actor and returns when its `started` has. Raises SpawnFailed."""
        return await self._family.spawn(spec)

    def lookup(self, path: str) -> Ref | None:
        """The living top-level actor of that name; `name/child` for what lives below it in this process."""
        return self._family.lookup(path)

    async def stop(self, ref: Ref) -> None:
        """Stops a top-level actor and forgets it."""
        await self._family.stop(ref.name)

    def kill(self) -> None:
        """Ends all actors and processes at once, without asking; leaving the node is quick then."""
        self._family.kill()

    async def failed(self) -> NoReturn:
        """Waits for the node's failure and raises it."""
        raise await asyncio.shield(self._failure)

    async def listen(self) -> str:
        """Listens, if it does not yet; the endpoint."""
        async with self._listening:
            if self._listener is None:
                if self.transport == "unix" and self._folder is None:
                    self._own_folder = tempfile.TemporaryDirectory(prefix="gyre-", dir=_short_folder())
                    self._folder = Path(self._own_folder.name)
                self._listener = await listen(
                    self.transport, self.id, self.links.accept, folder=self._folder, host=self.host
                )
        return self._listener.endpoint

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self._failure: asyncio.Future[NodeFailed] = self.loop.create_future()
        self._owner = asyncio.current_task()
        self._cancels = self._owner.cancelling() if self._owner is not None else 0
        self._in_body = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._in_body = False
        ours = self._failed is not None and kind is not None and issubclass(kind, asyncio.CancelledError)
        # Only our own cancel is taken back; one from outside goes on, as with a TaskGroup.
        ours = ours and self._owner is not None and self._owner.uncancel() <= self._cancels
        await self._shut()
        if self._failed is not None and (ours or kind is None):
            raise self._failed

    # --- for the rest of the runtime ------------------------------------------------------------

    @staticmethod
    def new_node_id() -> str:
        return secrets.token_hex(8)

    @property
    def endpoint(self) -> str:
        return "" if self._listener is None else self._listener.endpoint

    @property
    def peer(self) -> Peer:
        return Peer(self.id, self.name, self.endpoint)

    def bind(self, node_id: str, endpoint: str, id: int, name: str, incarnation: int) -> Ref:
        """A Ref that came from elsewhere, made to work here."""
        target: Target = self.remote
        if node_id == self.id:
            target = self.lives.get(id) or Nowhere(self, self.exit_of(id))
        return Ref(node_id, endpoint, id, name, incarnation, target)

    async def launch(self, spec: Spec, incarnation: int) -> Running:
        """A new life; when it could not start it has `ended` already. SpawnFailed where none was begun."""
        if isinstance(spec, ProcessSpec):
            if self.transport == "memory":
                raise SpawnFailed(spec.name, ExitReason(kind="error", message="memory ends at this process"))
            await self.listen()
            process = ChildProcess(self, spec, incarnation)
            self.processes.add(process)
            await process.start()
            return process
        try:
            actor = spec.start()
        except Exception as error:
            raise SpawnFailed(spec.name, ExitReason.of(error)) from error
        life = Life(self, actor, spec.name, incarnation, spec.mailbox)
        self.lives[life.id] = life
        await life.start(spec.shutdown_s)
        return life

    def boot(self, spec: ProcessSpec, node_id: str, incarnation: int) -> Boot:
        return Boot(
            name=spec.name,
            incarnation=incarnation,
            actor=spec.actor,
            config=self.codec.encode(spec.config),
            mailbox=spec.mailbox,
            shutdown_s=spec.shutdown_s,
            node_id=node_id,
            parent=self.peer,
            parent_pid=os.getpid(),
            token=self.token,
            transport=self.transport,
            host=self.host,
            folder=str(self._folder or ""),
            sys_path=[str(Path(entry).absolute()) for entry in sys.path],
            python_path=os.environ.get("PYTHONPATH"),
        )

    def forget(self, life: Life) -> None:
        """A life is over."""
        self.lives.pop(life.id, None)
        if life.exit is not None:
            self._exits[life.id] = life.exit
        if len(self._exits) > EXITS_KEPT:
            del self._exits[next(iter(self._exits))]
        for link in self.links.all():
            link.settle(life.id)

    def exit_of(self, id: int) -> ExitReason:
        return self._exits.get(id) or ExitReason(kind="unknown", message="no such actor here any more")

    def dead_letter(self, ref: Ref, message: str) -> None:
        self.dead_letters.add(ref.label, message)

    # --- the end --------------------------------------------------------------------------------

    def _fail(self, reason: ExitReason) -> None:
        if self._failed is not None:
            return
        self._failed = NodeFailed(self.name, reason)
        self._failure.set_result(self._failed)
        log.error("node_failed", node=self.name, reason=str(reason))
        if self._in_body and self._owner is not None:
            self._owner.cancel()

    async def _shut(self) -> None:
        try:
            await self._family.close()
        finally:
            self._family.kill()
            await self._reap()
            self.links.close()
            if self._listener is not None:
                self._listener.close()
            self.deadlines.close()
            self.dead_letters.close()
            await asyncio.sleep(0)  # closed transports tell their protocols on the next turn
            if self._own_folder is not None:
                self._own_folder.cleanup()

    async def _reap(self) -> None:
        ends = [process.ended for process in self.processes.all()]
        ends += [life.ended for life in self.lives.values()]
        if ends:
            await asyncio.wait(ends, timeout=REAP_WAIT_S)


def _ignore(message: Tell) -> None:
    """A node has no mailbox."""


def _short_folder() -> str | None:
    """The path of a unix socket has 107 bytes at most; a deep TMPDIR is not used."""
    return None if len(tempfile.gettempdir()) < 60 else "/tmp"
