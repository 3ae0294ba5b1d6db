"""The process of a ProcessSpec's actor: `python -m gyre.actors.child NAME`, its Boot on standard input."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import signal
import sys
import typing
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from gyre.actors.actor import Actor
from gyre.actors.boot import Boot, ServerBoot
from gyre.actors.errors import ExitReason, SpawnFailed
from gyre.actors.family import Running
from gyre.actors.loop import run
from gyre.actors.node import Node
from gyre.actors.process import Parent
from gyre.actors.specs import ChildSpec
from gyre.actors.transport import make_transport
from gyre.actors.wire import Booted, Ended

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when the thread that started it ends, kill -9 included."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it was gone before we asked
        os._exit(1)


def load(actor: str) -> type[Actor]:
    """`package.module:Class`, imported."""
    module, _, name = actor.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise TypeError(f"{actor} is no Actor")
    return found


def config_type(actor: type[Actor]) -> Any:
    """The annotation of its constructor's parameter; None where it has none."""
    hints = {name: hint for name, hint in typing.get_type_hints(actor.__init__).items() if name != "return"}
    if len(hints) > 1:
        raise TypeError(
            f"{actor.__qualname__}.__init__ takes {', '.join(hints)}: one annotated config is needed"
        )
    return next(iter(hints.values()), None)


def builder(node: Node, actor: type[Actor], config: bytes) -> Callable[[], Actor]:
    kind = config_type(actor)
    value = node.codec.decode(kind, msgspec.Raw(config))
    return actor if kind is None else lambda: actor(value)  # type: ignore[call-arg]


class Child:
    """One process: one node, one actor."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._actor: type[Actor] | None = None
        self._reason: ExitReason | None = None

    def load(self) -> None:
        """Imports the actor's module, which may take long, before there is a loop that it would block."""
        gc.disable()  # what is imported stays: collections take a fifth of the time that torch does
        try:
            self._actor = load(self._boot.actor)
        except Exception as error:
            self._reason = ExitReason.of(error)
        finally:
            gc.enable()

    async def main(self, node: Node, parent: Parent) -> int:
        """Lives as the actor does, or until the parent wants it to stop or is gone; the exit code."""
        boot = self._boot
        node.processes.parent = parent
        async with node:
            await node.listen()
            link = node.links.connect(boot.parent.node_id, boot.parent.endpoint)
            await link.opened.wait()
            node.neighbours.meet(node.neighbours.desk_of(boot.parent))
            life = await self._start(node)
            link.send(Booted(0, life.ref.id if life is not None else 0, node.endpoint, self._reason))
            if life is not None:
                self._reason = await parent.outlive(life, boot.shutdown_s)
                link.send(Ended(0, self._reason))
            await link.drain()
        if self._reason is None or not self._reason.abnormal:
            return 0
        sys.stderr.write(self._reason.traceback)
        return 1

    async def _start(self, node: Node) -> Running | None:
        """None where it could not be started, for `_reason`."""
        if self._actor is None:
            return None
        boot = self._boot
        try:
            start = builder(node, self._actor, boot.config)
            spec = ChildSpec(name=boot.name, start=start, shutdown_s=boot.shutdown_s, mailbox=boot.mailbox)
            life = await node.launch(spec, boot.incarnation)
        except SpawnFailed as error:
            self._reason = error.reason
        except Exception as error:
            self._reason = ExitReason.of(error)
        else:
            if not life.ended.done():
                return life
            self._reason = life.ended.result()
        return None


class _Log(io.RawIOBase):
    """What this process prints goes to its log. On a full disk it is lost, and whoever prints goes on."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            os.write(1, data)
        return len(data)


def main() -> None:
    log_what_is_printed()
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Boot)
    die_with_parent(boot.parent_pid)
    start_on(boot)


def log_what_is_printed() -> None:
    sys.stdout = sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_Log()), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def start_on(boot: Boot) -> NoReturn:
    """The rest of this process' life."""
    see_modules_of(boot)
    child = Child(boot)
    child.load()
    _exit(run(_main(boot, child)))


def see_modules_of(boot: Boot | ServerBoot) -> None:
    """As whoever started it sees them."""
    sys.path[:] = boot.sys_path
    if boot.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = boot.python_path


async def _main(boot: Boot, child: Child) -> int:
    parent = Parent(boot.parent.node_id)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, parent.terminate)
    transport = make_transport(boot.transport, boot.where)
    node = Node(boot.name, transport=transport, token=boot.token, node_id=boot.node_id)
    return await child.main(node, parent)


def _exit(code: int) -> NoReturn:
    """Without taking the interpreter apart: after torch was imported that takes seconds, and everything that
    is to end in order has, in the actor's `stopping` or by `atexit`."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
