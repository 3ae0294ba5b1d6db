"""`gyre join HOST:PORT --token-file FILE`: this machine works for a job until one of the two ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import structlog

from gyre.actors import Actor, ActorError, ChildSpec, Down, ExitReason, LinkLost, Node, Ref, handles
from gyre.actors import run as run_actors
from gyre.actors.forking.keeper import ForkServer
from gyre.actors.handshake import HandshakeFailed
from gyre.actors.token import TokenError, read_token
from gyre.actors.transport import TcpTransport
from gyre.cell.ranks import RANK_MODULES, rank_environment
from gyre.cell.satellites import GetJobFacts, JobFacts, Join, Leave
from gyre.harness.far import JoinHarness, LeaveHarness
from gyre.interrupts import Interrupts

log = structlog.get_logger()

OVER, LOST, BAD_ARGUMENTS, REFUSED, INTERRUPTED = 0, 1, 2, 3, 130
RETRY_S = 0.5
PLACING_S = 600.0
LEAVING_S = 600.0
SHM = Path("/dev/shm")


class CannotJoin(Exception):
    """`code` is the exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`job` is the job's HOST:PORT; `listen` the address of this machine that the job's others reach, by
    default that by which the job is reached. It takes so many `cells`, and plays so many `executions` at a
    time. Until it answers the job is called again for `wait_s`."""

    job: str
    token_file: Path
    name: str
    listen: str = ""
    cells: int = 1
    executions: int = 0
    wait_s: float = 60.0


def main(options: JoinOptions) -> int:
    """The exit code: 0 the job is over or this machine has left it, 1 the job is lost or cannot be reached,
    2 bad arguments, 3 refused, 130 aborted."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        host, port = address_of(options.job)
        token = read_token(options.token_file)
        return run_actors(_join(options, host, port, token))
    except (CannotJoin, TokenError) as error:
        sys.stderr.write(f"{error}\n")
        return error.code if isinstance(error, CannotJoin) else BAD_ARGUMENTS
    except KeyboardInterrupt:  # while the loop was not there yet, or no more
        return INTERRUPTED


async def _join(options: JoinOptions, host: str, port: int, token: bytes) -> int:
    listen = options.listen or await _own_address(host, port)
    node = Node(options.name, transport=TcpTransport(listen), token=token)
    with Interrupts(node.kill) as interrupts, _shm_folder(node.id) as shm_folder:
        try:
            async with node:
                await _listen(node, listen)
                first = asyncio.create_task(interrupts.first.wait())
                try:
                    return await Membership(node, options, shm_folder).run(f"tcp:{host}:{port}", first)
                finally:
                    first.cancel()
        except asyncio.CancelledError:
            if not interrupts.aborted:
                raise
            log.warning("aborted")
            return INTERRUPTED


class Member(Actor):
    """Hears of the job's end."""

    def __init__(self, satellites: Ref, over: asyncio.Future[ExitReason]) -> None:
        self._satellites = satellites
        self._over = over

    async def started(self) -> None:
        self.context.monitor(self._satellites)

    @handles(Down)
    async def down(self, message: Down) -> None:
        if not self._over.done():
            self._over.set_result(message.reason)


class Membership:
    """From the first call to the job to the end."""

    def __init__(self, node: Node, options: JoinOptions, shm_folder: Path) -> None:
        self._node = node
        self._options = options
        self._shm_folder = shm_folder

    async def run(self, endpoint: str, interrupt: asyncio.Task[bool]) -> int:
        """The exit code. Raises CannotJoin."""
        joining = asyncio.create_task(self._join(endpoint))
        await asyncio.wait((joining, interrupt), return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            joining.cancel()
            return INTERRUPTED
        satellites, over = joining.result()
        await asyncio.wait((over, interrupt), return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            return await self._leave(satellites)
        reason = over.result()
        if reason.abnormal:
            raise CannotJoin(LOST, f"the job at {self._options.job} is lost: {reason.brief}")
        log.info("job_over", job=self._options.job)
        return OVER

    async def _join(self, endpoint: str) -> tuple[Ref, asyncio.Future[ExitReason]]:
        satellites = await self._find(endpoint)
        over: asyncio.Future[ExitReason] = asyncio.get_running_loop().create_future()
        member = ChildSpec(name="member", start=lambda: Member(satellites, over), restart="temporary")
        await self._node.spawn(member)
        try:
            facts = await satellites.ask(GetJobFacts())
            cells = await self._take_cells(satellites, facts) if self._options.cells else ()
            if self._options.executions:
                await self._take_executions(satellites)
        except ActorError as error:
            why = f"the job at {self._options.job} does not take this machine: {error}"
            raise CannotJoin(LOST, why) from error
        executions = self._options.executions
        log.info("joined", job=facts.name, at=self._options.job, cells=list(cells), executions=executions)
        return satellites, over

    async def _take_cells(self, satellites: Ref, facts: JobFacts) -> tuple[int, ...]:
        """Those that it is given at once."""
        missing = [path for path in facts.paths if not os.access(path, os.R_OK)]
        if missing:
            why = "a job's folders must be at the same place on all its machines"
            raise CannotJoin(LOST, f"this machine does not see {missing[0]}: {why}")
        await self._start_fork_server(facts)
        join = Join(node=self._own(), cells=self._options.cells, shm_folder=self._shm_folder)
        return await satellites.ask(join, timeout_s=PLACING_S)

    async def _take_executions(self, satellites: Ref) -> None:
        harness = await self._harness(satellites)
        join = JoinHarness(node=self._own(), executions=self._options.executions)
        await harness.ask(join, timeout_s=PLACING_S)

    async def _harness(self, satellites: Ref) -> Ref:
        """The HarnessActor: the job starts it before the satellites."""
        harness = await self._node.find("harness")
        if harness is None:
            raise CannotJoin(LOST, f"the job at {self._options.job} has no harness")
        return harness

    def _own(self) -> Ref:
        """This machine, as the job knows it."""
        neighbour = self._node.neighbours.desk()
        assert neighbour is not None
        return neighbour.ref

    async def _start_fork_server(self, facts: JobFacts) -> None:
        if not self._node.fork_server:
            start = partial(ForkServer, RANK_MODULES, rank_environment(facts.threads_per_rank))
            await self._node.spawn(ChildSpec(name="fork-server", start=start))

    async def _find(self, endpoint: str) -> Ref:
        """The job, as soon as it is there."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.wait_s
        waiting = False
        while True:
            try:
                root = await self._node.reach(endpoint)
                satellites = await self._node.find("satellites", at=root)
                if satellites is not None:
                    return satellites
                why = "it is no job, or has not got that far"
            except HandshakeFailed as error:
                raise CannotJoin(REFUSED, f"{self._options.job}: {error}") from error
            except (LinkLost, ActorError) as error:
                why = str(error)
            if loop.time() + RETRY_S > deadline:
                raise CannotJoin(LOST, f"no job answers at {self._options.job}: {why}")
            if not waiting:
                waiting = True
                log.info("waiting_for_job", at=self._options.job, why=why, wait_s=self._options.wait_s)
            await asyncio.sleep(RETRY_S)

    async def _leave(self, satellites: Ref) -> int:
        """Drains: the cells hand over and go."""
        log.info("leaving", job=self._options.job)
        neighbour = self._node.neighbours.desk()
        if neighbour is not None:
            try:
                if self._options.executions:
                    harness = await self._harness(satellites)
                    await harness.ask(LeaveHarness(node=neighbour.ref), timeout_s=LEAVING_S)
                if self._options.cells:
                    await satellites.ask(Leave(node=neighbour.ref), timeout_s=LEAVING_S)
            except (ActorError, CannotJoin) as error:
                log.warning("not_drained", reason=str(error))
        log.info("left", job=self._options.job)
        return OVER


async def _listen(node: Node, address: str) -> None:
    try:
        await node.listen()
    except OSError as error:
        raise CannotJoin(BAD_ARGUMENTS, f"cannot listen at {address}: {error}") from error


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CannotJoin(BAD_ARGUMENTS, f"{text!r} is no address of a job: HOST:PORT, as its first lines say")
    return host, int(port)


async def _own_address(host: str, port: int) -> str:
    """That of this machine's which the way to the job begins at. Nothing is sent."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CannotJoin(LOST, f"there is no way to {host}: {error}") from error


@contextmanager
def _shm_folder(node_id: str) -> Iterator[Path]:
    """Gone in the end. Folders of those that were killed are removed: nobody holds their lock."""
    for left in SHM.glob("gyre-join-*"):
        with _locked(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)
    folder, made = SHM / f"gyre-join-{node_id}", SHM / f"gyre-joins-{node_id}"
    made.mkdir(mode=0o700)
    with _locked(made):
        made.rename(folder)  # before it is locked, one that joins at the same time would remove it
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether the lock was free; it is held within the block."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone, or another user's
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(descriptor)
