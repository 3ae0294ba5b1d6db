"""The bridge as a plain process, without a sandbox around it."""

import asyncio
import hashlib
import os
import random
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from gyre.harness import bridge
from gyre.harness.bubblewrap import MODULES, START

Run = Callable[..., Awaitable[tuple[int, list[str], str]]]

LIMITS = ":".join([str(1 << 30)] * len(bridge.FIELDS))

SERVED = random.Random(0).randbytes(6 << 20)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
async def run_bridge(tmp_path: Path) -> AsyncIterator[Run]:
    """Runs a command behind a bridge: exit code, lines of the status, what the command said. `{port}` in it
    is the bridge's; behind the socket SERVED is sent to whoever has sent all of it and ended."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read() == b"":
            writer.write(b"nothing was sent")
        else:
            writer.write(SERVED)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "socket")
    code = tmp_path / "code" / "gyre" / "harness"
    code.mkdir(parents=True)
    for module in MODULES:
        shutil.copy(str(module.__file__), code)

    async def run(
        *command: str, port: int | None = None, program: tuple[str, ...] = ("-c", START, "{code}")
    ) -> tuple[int, list[str], str]:
        read, write = os.pipe()
        port = free_port() if port is None else port
        program = tuple(word.replace("{code}", str(tmp_path / "code")) for word in program)
        words = [word.replace("{port}", str(port)) for word in command]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", *program),
            *(str(write), LIMITS, str(port), str(tmp_path / "socket"), "1", str(tmp_path), *words),
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(write,),
        )
        os.close(write)
        said, _ = await process.communicate()
        status = os.read(read, 65536).decode().splitlines()
        os.close(read)
        return process.returncode or 0, status, said.decode()

    yield run
    server.close()


async def test_it_tells_an_exit(run_bridge: Run) -> None:
    assert await run_bridge("sh", "-c", "echo said; exit 5", port=0) == (5, ["started", "exit 5"], "said\n")


async def test_it_tells_a_signal(run_bridge: Run) -> None:
    assert await run_bridge("sh", "-c", "kill -15 $$", port=0) == (143, ["started", "signal 15"], "")


async def test_it_tells_that_the_command_could_not_be_started(run_bridge: Run) -> None:
    code, (status,), _ = await run_bridge("no-such-program", port=0)
    assert code == 127
    assert status.startswith("failed") and "no-such-program" in status


async def test_the_command_has_default_signals_and_no_status_to_write_to(run_bridge: Run) -> None:
    """A Python process ignores SIGPIPE and SIGXFSZ, which its children would inherit."""
    _, _, said = await run_bridge("sh", "-c", "grep SigIgn /proc/self/status; ls /proc/$$/fd", port=0)
    ignored, *fds = said.splitlines()
    assert int(ignored.split()[1], 16) & (1 << 12 | 1 << 24) == 0
    assert fds == ["0", "1", "2"]


UPLOAD = """
import hashlib, socket, sys, time
s = socket.create_connection(("127.0.0.1", {port}))
s.sendall(b"x" * (6 << 20))
s.shutdown(socket.SHUT_WR)
time.sleep(0.3)
digest, size = hashlib.sha256(), 0
while data := s.recv(100_000):
    digest.update(data)
    size += len(data)
print(size, digest.hexdigest())
"""


async def test_much_goes_both_ways_to_a_slow_reader(run_bridge: Run) -> None:
    _, _, said = await run_bridge(sys.executable, "-c", UPLOAD)
    assert said == f"{len(SERVED)} {hashlib.sha256(SERVED).hexdigest()}\n"


COUNTING = """
import sys, time
sys.path.insert(0, sys.argv.pop(1))
from gyre.harness import bridge
looks = 0
class Watch:
    is_looking = False
    def __init__(self, *_): pass
    def look(self): pass
    def exceeded(self):
        global looks
        looks += 1
bridge.Watch = Watch
bridge.os.getpid = lambda: 1
began = time.monotonic()
bridge.main(sys.argv[1:])
print(looks, time.monotonic() - began)
"""


async def test_processes_are_not_counted_for_each_chunk_that_is_relayed(run_bridge: Run) -> None:
    _, _, said = await run_bridge(sys.executable, "-c", UPLOAD, program=("-c", COUNTING, "{code}"))
    looks, took_s = said.splitlines()[-1].split()
    assert 1 <= int(looks) <= float(took_s) / bridge.WATCH_EVERY_S + 1


MANY = """
import shutil
import socket
ends = [socket.create_connection(("127.0.0.1", {port})) for _ in range(50)]
for end in ends[::2]:
    end.close()
for end in ends[1::2]:
    end.shutdown(socket.SHUT_WR)
print({end.recv(100) for end in ends[1::2]})
"""


async def test_many_connections_that_end_in_any_order(run_bridge: Run) -> None:
    code, _, said = await run_bridge(sys.executable, "-c", MANY)
    assert (code, said) == (0, "{b'nothing was sent'}\n")


FAILING = COUNTING.replace("looks += 1", "raise OSError('no\\nfile')").replace(
    "os.getpid", "os.kill = print; bridge.os.getpid"
)


async def test_a_fault_of_its_own_is_told_and_ends_all(run_bridge: Run) -> None:
    """Else it would be had from inside as an end that is no end of the command's."""
    command = (sys.executable, "-c", "input()")
    _, status, said = await run_bridge(*command, port=0, program=("-c", FAILING, "{code}"))
    assert status == ["started", "fault OSError: no file", "exit 137"]
    assert said.startswith("-1 Signals.SIGKILL\n") or said.startswith("-1 9\n")


LEAKING = """
import resource, select, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
ends = [socket.create_connection(("127.0.0.1", {port})) for _ in range(80)]
for end in ends:
    end.shutdown(socket.SHUT_WR)
print({end.recv(100) for end in ends})
"""


async def test_more_connections_than_it_may_have_files_wait(run_bridge: Run) -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))\n"
    start = ("-c", few + START, "{code}")
    code, status, said = await run_bridge(sys.executable, "-c", LEAKING, program=start)
    assert (code, status, said) == (0, ["started", "exit 0"], "{b'nothing was sent'}\n")
