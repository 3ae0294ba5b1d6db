"""The process of a ProcessSpec's actor: `python -m gyre.actors.child NAME`, its Boot on standard input."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gyre.actors.actor import Actor
from gyre.actors.boot import Boot
from gyre.actors.errors import ExitReason, SpawnFailed
from gyre.actors.log import log
from gyre.actors.loop import run
from gyre.actors.node import Node
from gyre.actors.process import Parent
from gyre.actors.specs import ChildSpec
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


async def _main(boot: Boot) -> int:
    folder = Path(boot.folder) if boot.folder else None
    node = Node(
        boot.name, transport=boot.transport, host=boot.host, folder=folder, token=boot.token,  # type: ignore[arg-type]
        node_id=boot.node_id,
    )  # fmt: skip
    parent = node.processes.parent = Parent(boot.parent.node_id)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, parent.wants_stop)
    async with node:
        await node.listen()
        link = node.links.connect(boot.parent.node_id, boot.parent.endpoint)
        reason, life_id = None, 0
        try:
            start = builder(node, load(boot.actor), boot.config)
            spec = ChildSpec(name=boot.name, start=start, shutdown_s=boot.shutdown_s, mailbox=boot.mailbox)
            life = await node.launch(spec, boot.incarnation)
            life_id = life.ref.id
            reason = life.ended.result() if life.ended.done() else None
        except SpawnFailed as error:
            reason = error.reason
        except Exception as error:
            reason = ExitReason.of(error)
        link.send(Booted(0, life_id, node.endpoint, reason))
        if reason is None:
            reason = await _live(life, parent, boot.shutdown_s)
            link.send(Ended(0, reason))
        if reason.abnormal:
            log.error("actor_died", actor=boot.name, reason=str(reason), trace=reason.traceback)
        await link.opened.wait()
        await link.drain()
    return 1 if reason.abnormal else 0


async def _live(life: Any, parent: Parent, shutdown_s: float) -> ExitReason:
    stop = asyncio.ensure_future(parent.stop.wait())
    await asyncio.wait([life.ended, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not life.ended.done():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, life.kill)
        life.request_stop()
        await asyncio.wait([life.ended], timeout=shutdown_s)
        life.kill()
    reason: ExitReason = await life.ended
    return reason


def main() -> None:
    boot = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Boot)
    die_with_parent(boot.parent_pid)
    sys.path[:] = boot.sys_path
    if boot.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = boot.python_path
    sys.exit(run(_main(boot)))


if __name__ == "__main__":
    main()
