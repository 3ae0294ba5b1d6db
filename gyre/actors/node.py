"""One process' actors, and its way to those of others."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from gyre.actors.boot import Boot
from gyre.actors.carrier import Carrier, OsCarrier
from gyre.actors.deadletters import DeadLetters
from gyre.actors.deadlines import Deadlines
from gyre.actors.desk import FIND_TIMEOUT_S, Find
from gyre.actors.envelope import CURRENT
from gyre.actors.errors import ExitReason, LinkLost, NodeFailed, SpawnFailed
from gyre.actors.family import Family, Running
from gyre.actors.forking.messages import FORK_SERVER
from gyre.actors.handshake import NONCE_BYTES, Peer
from gyre.actors.idle import Idle
from gyre.actors.life import Life
from gyre.actors.links import Links
from gyre.actors.log import log
from gyre.actors.looking.probes import Probes
from gyre.actors.looking.reports import Traced
from gyre.actors.messages import Tell
from gyre.actors.neighbours import Neighbours
from gyre.actors.process import ChildProcess, Processes
from gyre.actors.ref import DESK, Ref, Target
from gyre.actors.remote import Nowhere, RemoteTarget
from gyre.actors.remote_process import RemoteProcess
from gyre.actors.specs import ProcessSpec, Spec
from gyre.actors.supervision import Supervision
from gyre.actors.transport import (
    Channel,
    Listener,
    Receiver,
    Transport,
    TransportName,
    TransportUnusable,
    make_transport,
    usable_transport,
)
from gyre.actors.waits import Waits
from gyre.actors.wire import Codec

EXITS_KEPT = 1024
REAP_WAIT_S = 5.0


class Node:
    """`async with Node(name) as node`: on leaving, all actors are stopped, the youngest first, and no
    process, socket or task is left. A top-level actor whose failure nobody handles cancels the body, and
    NodeFailed is raised from it. Where there is no block, as in a notebook, `await node.start()` and
    `await node.stop()` do the same; it is `stop`, and `failed`, that raise then. Any running loop will do.

    Nothing listens until a child process is spawned or `listen` is called; then on a unix socket in the
    folder `where`, by default a new one, or on TCP or UCX at the address `where`, by default 127.0.0.1; where
    UCX cannot be used, on TCP, and a line says why. Peers must hold the same `token`. Of a peer on another
    machine nothing is heard when the machine dies: it counts as gone after four times `heartbeat_s` of
    silence. Blobs to and from peers of this host go through shared memory, unless `shared_memory` is false.
    All that is random comes from `rng`, time from the loop, and durations that people look at from `clock`,
    by default the machine's.
    """

    def __init__(
        self,
        name: str,
        *,
        transport: TransportName | Transport = "unix",
        where: str = "",
        token: bytes | None = None,
        node_id: str | None = None,
        heartbeat_s: float = 5.0,
        shared_memory: bool = True,
        rng: random.Random | None = None,
        carrier: Callable[[Node, ProcessSpec], Carrier] = OsCarrier,
        supervision: Supervision | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.name = name
        self.clock = clock
        self.carrier = carrier
        self.heartbeat_s = heartbeat_s
        self.shared_memory = shared_memory
        # The socket of the one that processes of this machine are forked by, if any.
        self.fork_server = os.environ.get(FORK_SERVER, "")
        self.rng = rng or random.SystemRandom()
        self.id = node_id or self.new_node_id()
        self.token = token or self.rng.randbytes(32)
        self.transport = usable_transport(transport, where) if isinstance(transport, str) else transport
        self._others: dict[str, Transport] = {}
        self.lives: dict[int, Life] = {}
        self.dead_letters = DeadLetters(name, lambda: self.loop.time())
        self.processes = Processes()
        self.remote = RemoteTarget(self)
        self.codec = Codec(self.id, lambda: self.endpoint, self.bind)
        self.links = Links(self)
        self.neighbours = Neighbours(self)
        self.probes = Probes(self)
        self.waits = Waits(self)
        self._listener: Listener | None = None
        self._listening = asyncio.Lock()
        self._exits: dict[int, ExitReason] = {}
        # Ids of messages and lives: unique over the nodes of a job without a word between them.
        self.new_id: Callable[[], int] = itertools.count((self.rng.getrandbits(30) << 32) + 1).__next__
        self._family = Family(self, name, supervision or Supervision(), self._fail, _ignore)
        self._failed: NodeFailed | None = None
        self._owner: asyncio.Task[object] | None = None
        self._in_body = False
        self._started = False

    # --- the public face ------------------------------------------------------------------------

    async def spawn(self, spec: Spec) -> Ref:
        """Starts a top-level actor and returns when its `started` has. Raises SpawnFailed."""
        return await self._family.spawn(spec)

    def lookup(self, path: str) -> Ref | None:
        """The living top-level actor of that name; `name/child` for what lives below it in this process."""
        return self._family.lookup(path)

    def register(self, name: str, ref: Ref) -> None:
        """`find` finds it under that name too, also its later lives where it is restarted by its parent in
        this process. A name that is taken is taken over."""
        self.neighbours.names.register(name, ref)

    async def find(self, name: str, at: Ref | None = None) -> Ref | None:
        """The living actor that was registered under that name, or the top-level one that has it: of this
        node, else of its parent's, else of those that it has reached or that have reached it, and so on.
        With `at`, which `reach` answers, it is looked for there first."""
        if at is not None:
            return await at.ask(Find(name=name), timeout_s=FIND_TIMEOUT_S)
        return await self.neighbours.find(name)

    async def reach(self, endpoint: str) -> Ref:
        """The node that listens at `endpoint`, as `tcp:HOST:PORT`: its name, what `find` and a ProcessSpec's
        `node` take; monitor it to learn of its end. LinkLost where none answers that holds the token."""
        return await self.neighbours.reach(endpoint)

    async def start(self) -> Self:
        """Once, on the running loop."""
        if self._started:
            raise RuntimeError(f"the node {self.name} was started before: make a new one")
        self._started = True
        self.loop = asyncio.get_running_loop()
        self.began_s = self.loop.time()
        self.deadlines = Deadlines(self.loop)
        self.idle = Idle(self.loop)
        self._failure: asyncio.Future[NodeFailed] = self.loop.create_future()
        # Of tasks that are nobody's: they run in no message's scope.
        self.context = copy_context()
        self.context.run(CURRENT.set, None)
        return self

    async def stop(self, ref: Ref | None = None) -> None:
        """Stops a top-level actor and forgets it; without one, the whole node, again and again if you like.
        NodeFailed where that had failed."""
        if ref is not None:
            await self._family.stop(ref.name)
            return
        await self._shut()
        if self._failed is not None:
            raise self._failed

    def trace(self, sink: Callable[[Traced], None]) -> AbstractContextManager[None]:
        """`with node.trace(sink)`: hands over each message that an actor of this node has handled."""
        return self.probes.trace(sink)

    def desk(self, of: Ref | None = None) -> Ref:
        """The actor that stands for this node, or for that of the actor `of`: it takes `Inspect` and `Trace`
        of `gyre.actors.looking`."""
        if of is not None and of.node_id != self.id:
            return self.bind(of.node_id, of.endpoint, DESK, "desk", 1)
        self.neighbours.desk()
        return self.bind(self.id, "", DESK, self.name, 1)

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
                self._listener = await self.transport.listen(self.id, self.links.accept)
        return self._listener.endpoint

    async def __aenter__(self) -> Self:
        await self.start()
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

    def new_node_id(self) -> str:
        return self.rng.randbytes(8).hex()

    def nonce(self) -> bytes:
        return self.rng.randbytes(NONCE_BYTES)

    async def dial(self, endpoint: str, receiver: Receiver) -> Channel:
        """LinkLost where nobody answers."""
        scheme, _, rest = endpoint.partition(":")
        try:
            transport = self.transport if scheme == self.transport.scheme else self._other(scheme)
            return await transport.dial(rest, receiver)
        except (OSError, ValueError, OverflowError, LinkLost, TransportUnusable) as error:
            raise LinkLost(f"cannot reach {endpoint!r}: {error}") from error

    def _other(self, scheme: str) -> Transport:
        """A transport that this node only dials by."""
        if scheme not in self._others:
            self._others[scheme] = make_transport(scheme)
        return self._others[scheme]

    def life(self, id: int) -> Life | None:
        """The living actor of that id."""
        return self.neighbours.desk() if id == DESK else self.lives.get(id)

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

    @property
    def family(self) -> Family:
        """Its top-level actors."""
        return self._family

    async def launch(
        self,
        spec: Spec,
        incarnation: int,
        begun: Callable[[Running], None] | None = None,
        home: Family | None = None,
    ) -> Running:
        """A new life; when it could not start it has `ended` already. SpawnFailed where none was begun.
        `begun` is told of it before it starts, `home` is the family it will be of."""
        if isinstance(spec, ProcessSpec) and spec.node is not None and spec.node.node_id != self.id:
            remote = RemoteProcess(self, spec, incarnation, home)
            if begun is not None:
                begun(remote)
            await remote.start()
            return remote
        if isinstance(spec, ProcessSpec):
            if self.transport.scheme == "memory":
                raise SpawnFailed(spec.name, ExitReason(kind="error", message="memory ends at this process"))
            await self.listen()
            process = ChildProcess(self, spec, incarnation, home)
            self.processes.add(process)
            if begun is not None:
                begun(process)
            await process.start()
            return process
        try:
            actor = spec.start()
        except Exception as error:
            raise SpawnFailed(spec.name, ExitReason.of(error)) from error
        life = Life(self, actor, spec.name, incarnation, spec.mailbox, home)
        self.lives[life.id] = life
        self.probes.life_began(life)
        if begun is not None:
            begun(life)
        await life.start(spec.shutdown_s)
        return life

    def boot(self, spec: ProcessSpec, node_id: str, incarnation: int) -> Boot:
        return Boot(
            name=spec.name,
            incarnation=incarnation,
            actor=spec.actor,
            config=self.codec.encode_whole(spec.config),
            mailbox=spec.mailbox,
            shutdown_s=spec.shutdown_s,
            node_id=node_id,
            parent=self.peer,
            parent_pid=os.getpid(),
            token=self.token,
            transport=self.transport.scheme,
            where=self.transport.where,
            sys_path=[str(Path(entry).absolute()) for entry in sys.path],
            python_path=os.environ.get("PYTHONPATH"),
        )

    def forget(self, life: Life) -> None:
        """A life is over."""
        self.lives.pop(life.id, None)
        self.idle.forget(life)
        self.probes.life_ended(life)
        if life.exit is not None:
            self._exits[life.id] = life.exit
        if len(self._exits) > EXITS_KEPT:
            del self._exits[next(iter(self._exits))]
        for link in self.links.all():
            link.settle(life.id)

    def exit_of(self, id: int) -> ExitReason:
        return self._exits.get(id) or ExitReason(kind="unknown", message="no such actor here any more")

    def dead_letter(self, ref: Ref, message: str, reason: ExitReason) -> None:
        self.dead_letters.add(ref.label, message, reason.brief)

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
            await self.neighbours.close()
        finally:
            self._family.kill()
            await self._reap()
            self.links.close()
            if self._listener is not None:
                self._listener.close()
            self.deadlines.close()
            self.probes.close()
            self.idle.close()
            self.dead_letters.close()
            await asyncio.sleep(0)  # closed transports tell their protocols on the next turn
            for transport in (self.transport, *self._others.values()):
                await transport.close()

    async def _reap(self) -> None:
        """What somebody still started while the node was left ends too."""
        left: list[Running] = [*self.processes.all(), *self.lives.values()]
        for running in left:
            running.kill()
        if left:
            await asyncio.wait([running.ended for running in left], timeout=REAP_WAIT_S)


def _ignore(message: Tell) -> None:
    """A node has no mailbox."""
