"""`python -m gyre.actors.forking.server FD`: a process that has imported what others need, and forks them. FD
is the socket that it listens at, its ServerBoot on standard input.

It has one thread, no event loop and no handler of a signal, and refuses where what it has imported did more
than that, or is not what the new process would have imported: then that one is started as any other."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import selectors
import signal
import socket
import sys
from functools import partial
from typing import Any

import msgspec

from gyre.actors.boot import Boot, ServerBoot
from gyre.actors.child import die_with_parent, log_what_is_printed, see_modules_of, start_on
from gyre.actors.forking.imported import Imported
from gyre.actors.forking.messages import Exited, Forked, ForkRequest, Refused, send_reply

PR_SET_NAME = 15
FIRST_FREE = 3  # after stdin, stdout, stderr


class Client:
    """Who asked, and the process that it has."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = 0
        self.pidfd = -1
        self.open = True

    @property
    def ended(self) -> bool:
        return self.pidfd < 0

    def kill(self) -> None:
        """With all that it started; it need not lead its group yet."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class ForkServer:
    def __init__(self, listener: socket.socket, boot: ServerBoot) -> None:
        self._listener = listener
        self._boot = boot
        self._imported: Imported | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._clients: set[Client] = set()

    def serve(self) -> Boot:
        """Ends with this process; returns in the processes that it forks."""
        if not self._boot.lazy:
            self._load()
        while True:
            for key, _ in self._selector.select():
                forked: Boot | None = key.data()
                if forked is not None:
                    return forked

    def _load(self) -> Imported:
        if self._imported is None:
            self._imported = Imported()
            self._imported.load(self._boot.modules)
        return self._imported

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        client = Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, client))

    def _hear(self, client: Client) -> Boot | None:
        """A request, or that nobody wants the process any more."""
        try:
            data, files, _, _ = socket.recv_fds(client.connection, 16, 3, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, files = b"", []
        try:
            if not data or client.pid:
                self._leave(client)
                return None
            return self._fork(client, files)
        finally:
            for file in files:
                with contextlib.suppress(OSError):  # a fork has closed all
                    os.close(file)

    def _fork(self, client: Client, files: list[int]) -> Boot | None:
        try:
            with open(files[0], "rb", closefd=False) as file:
                request = msgspec.msgpack.decode(file.read(), type=ForkRequest)
            output, life = files[1:3]
        except (IndexError, ValueError, OSError, msgspec.MsgspecError) as error:
            self._refuse(client, f"this is no request: {error}")
            return None
        imported = self._load()
        if why := imported.refuses(request):
            self._refuse(client, why)
            return None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            client.pid = os.fork()
        except OSError as error:
            self._refuse(client, str(error))
            return None
        if client.pid == 0:
            files.clear()  # their numbers will be others'
            self._become(client, request, imported, output, life)
            return request.boot
        client.pidfd = os.pidfd_open(client.pid)
        self._selector.register(client.pidfd, selectors.EVENT_READ, partial(self._ended, client))
        return None

    def _refuse(self, client: Client, why: str) -> None:
        with contextlib.suppress(OSError):
            send_reply(client.connection, Refused(why))
        self._leave(client)

    def _ended(self, client: Client) -> None:
        """It is not reaped before its connection is closed: until then its pid, by which it and what it left
        of its group are signalled, is no other's."""
        end = os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        client.kill()
        self._selector.unregister(client.pidfd)
        os.close(client.pidfd)
        client.pidfd = -1
        if not client.open:
            self._reap(client)
            return
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        with contextlib.suppress(OSError):
            send_reply(client.connection, Exited(code))

    def _leave(self, client: Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        client.open = False
        if client.pid and not client.ended:
            client.kill()
        else:
            self._reap(client)

    def _reap(self, client: Client) -> None:
        self._clients.discard(client)
        if client.pid:
            os.waitpid(client.pid, 0)

    # --- in the fork ----------------------------------------------------------------------------

    def _become(self, me: Client, request: ForkRequest, imported: Imported, output: int, life: int) -> None:
        """What an exec would have made of it."""
        os.setsid()
        die_with_the_other_end_of(life)
        _name(request.boot.name)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for file, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(file, number)
        try:
            send_reply(me.connection, Forked(os.getpid()), os.pidfd_open(os.getpid()))
        except OSError:
            os._exit(1)  # nobody waits for it
        self._close_all(life)
        os.environ.clear()
        os.environ.update(imported.environment(request.environment))
        os.chdir(request.folder)
        sys.argv[1:] = [request.boot.name]
        _draw_anew()
        gc.enable()

    def _close_all(self, but: int) -> None:
        """The objects first: one that is found to be garbage later would close what has its number then."""
        self._selector.close()
        self._listener.close()
        for client in self._clients:
            client.connection.close()
        self._clients.clear()
        for number in map(int, os.listdir("/proc/self/fd")):
            if number >= FIRST_FREE and number != but:
                with contextlib.suppress(OSError):  # that of the listing itself
                    os.close(number)


def die_with_the_other_end_of(pipe: int) -> None:
    """The kernel kills this process' group, which it leads, as soon as no process has that end open, kill -9
    of it included. What PR_SET_PDEATHSIG does for a child of whom it is for; this is the server's."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(pipe, 1)
        os._exit(1)  # it was closed before we asked


def _name(name: str) -> None:
    """As `top` shows it."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _draw_anew() -> None:
    """Python's own generator, uuid, secrets and tempfile see to it themselves, and torch's begins at the same
    seed in every process; numpy's was seeded once, by its import."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()


def main() -> None:
    log_what_is_printed()
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ServerBoot)
    die_with_parent(boot.parent_pid)
    see_modules_of(boot)
    listener = socket.socket(fileno=int(sys.argv[1]))
    start_on(ForkServer(listener, boot).serve())


if __name__ == "__main__":
    main()
