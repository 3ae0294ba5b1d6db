"""Nothing of a server outlives its cell, whatever ends it; its ports are its own."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.cell.engine import sglang_keeper
from gyre.cell.engine.base import EngineFault
from gyre.cell.engine.sglang_device import DeviceMemory
from gyre.cell.engine.sglang_ports import HeldPort

# A server with a child that leaves its session, as a worker of SGLang may.
SERVER = """
import os, signal, sys, time
child = os.fork()
if child == 0:
    os.setsid()
    signal.pause()
print(os.getpid(), child, flush=True)
{then}
"""


def keep(then: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", sglang_keeper.__file__, sys.executable, "-c", SERVER.format(then=then)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert keeper.stdout is not None
    return keeper, [int(pid) for pid in keeper.stdout.readline().split()]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_it_ends_with_the_cell() -> None:
    keeper, pids = keep("signal.pause()")
    assert not gone(pids)
    assert keeper.stdin is not None
    keeper.stdin.close()
    assert keeper.wait() == 128 + signal.SIGKILL
    assert gone(pids)


def test_it_is_asked_first() -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))"
    keeper, pids = keep(f"{handler}; print('ready', flush=True); signal.pause()")
    assert keeper.stdin is not None and keeper.stdout is not None
    keeper.stdout.readline()
    os.write(keeper.stdin.fileno(), b"t")
    assert keeper.wait() == 3
    assert gone(pids)
    keeper.stdin.close()


def test_what_it_started_ends_with_it() -> None:
    keeper, pids = keep("sys.exit(7)")
    assert keeper.wait() == 7
    assert gone(pids)


def test_a_killed_keeper_takes_the_server_with_it() -> None:
    keeper, pids = keep("signal.pause()")
    ended = os.pidfd_open(pids[0])
    keeper.kill()
    keeper.wait()
    assert select.select([ended], [], [], 10.0)[0]
    os.close(ended)
    os.kill(pids[1], signal.SIGKILL)  # which only its own parent's end would end, as SGLang's workers do


def test_a_held_port_is_the_servers_alone() -> None:
    first, second = HeldPort(), HeldPort()
    assert first.number != second.number
    assert not first.answers()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", first.number))
        server.listen()
        assert first.answers()
    first.close()
    second.close()


GIB = 1 << 30


async def test_memory_that_comes_back_late_is_waited_for() -> None:
    free = iter([20 * GIB, 20 * GIB, 60 * GIB, 88 * GIB])
    memory = DeviceMemory(lambda: (next(free), 100 * GIB))
    await memory.until_returned(memory.free_bytes(), held=70 * GIB)
    assert list(free) == []


async def test_what_a_server_keeps_is_not_waited_for() -> None:
    memory = DeviceMemory(lambda: (60 * GIB, 100 * GIB), timeout_s=0.05)
    await memory.until_returned(20 * GIB, held=44 * GIB)
    with pytest.raises(EngineFault, match="after the server released its memory"):
        await memory.until_returned(20 * GIB, held=50 * GIB)


async def test_memory_that_does_not_come_back_is_a_fault() -> None:
    memory = DeviceMemory(lambda: (30 << 30, 100 << 30), timeout_s=0.05)
    with pytest.raises(EngineFault, match=r"30\.0 of 100\.0 GiB free to start a server in, wanted 50\.0"):
        await memory.until_startable(0.5)
    await DeviceMemory(None).until_startable(0.5)
