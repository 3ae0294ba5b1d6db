"""What only walls can do: nothing but the proxy's socket can be reached from inside."""

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gyre.harness import seccomp
from gyre.harness.bubblewrap import Bubblewrap, exit_of, python_folders
from gyre.harness.output import Output
from gyre.harness.process import Exit
from gyre.harness.sandbox import Confined, SandboxMissing, run

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

Make = Callable[..., Confined]
KILLED = "all of it was killed:"


@pytest.fixture
def bubblewrap(tmp_path: Path) -> Bubblewrap:
    made = Bubblewrap(tmp_path / "sandbox")
    made.check()
    return made


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Path]:
    """A unix socket that answers each line with the line in capitals, and closes after `bye`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line.upper())
            await writer.drain()
            if line == b"bye\n":
                break
        writer.close()

    path = tmp_path / "proxy" / "socket"
    path.parent.mkdir()
    server = await asyncio.start_unix_server(serve, path)
    yield path
    server.close()


def test_a_home_folder_with_a_python_is_not_given_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("home/bin", "home/lib", "home/.ssh", "other/lib"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "other"))
    given = [folder for folder in python_folders() if folder.startswith(str(tmp_path))]
    assert given == [str(tmp_path / name) for name in ("other", "home/bin", "home/lib")]


async def probe(bubblewrap: Bubblewrap, make: Make, code: str, socket: Path | None = None) -> str:
    output = Output()
    confined = make(sys.executable, "-c", code, socket=socket)
    exit_ = await run(bubblewrap, confined, output, timeout_s=30.0)
    assert exit_.code == 0, output.tail()
    return output.tail()


async def test_the_hosts_loopback_cannot_be_reached(bubblewrap: Bubblewrap, confined: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nprint(socket.socket().connect_ex(('127.0.0.1', {port})))"
        assert await probe(bubblewrap, confined, code) == f"{errno.ECONNREFUSED}\n"


async def test_the_hosts_abstract_sockets_cannot_be_reached(bubblewrap: Bubblewrap, confined: Make) -> None:
    name = f"gyre-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        code = f"import socket\ns = socket.socket(socket.AF_UNIX)\nprint(s.connect_ex(chr(0) + '{name}'))"
        assert await probe(bubblewrap, confined, code) == f"{errno.ECONNREFUSED}\n"


async def test_there_is_no_other_network(bubblewrap: Bubblewrap, confined: Make) -> None:
    code = "import os\nprint(sorted(os.listdir('/proc/sys/net/ipv4/conf')))"
    text = await probe(bubblewrap, confined, code)
    assert "eth" not in text and "lo" in text
    code = "import socket\nprint(socket.socket().connect_ex(('192.0.2.1', 80)))"
    assert await probe(bubblewrap, confined, code) == f"{errno.ENETUNREACH}\n"


async def test_the_hosts_files_are_not_there(bubblewrap: Bubblewrap, confined: Make, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    shadow = ["/etc/shadow", "/root/.ssh", "/root/.bashrc", "/var/log", "/proc/1/root/etc/shadow"]
    paths = [str(secret), str(tmp_path), __file__, str(Path.home()) + "/.profile", "/run", "/boot", *shadow]
    code = f"import os\nprint([p for p in {paths!r} if os.path.exists(p)])"
    assert await probe(bubblewrap, confined, code) == "[]\n"


async def test_only_its_own_folders_can_be_written(
    bubblewrap: Bubblewrap, confined: Make, tmp_path: Path
) -> None:
    code = """
import os, sys
done = []
for folder in ("/", "/usr", "/etc", "/gyre", "/home", sys.prefix, "/workspace", "/home/agent", "/tmp"):
    try:
        open(folder + "/file", "w").close()
        done.append(folder)
    except OSError:
        pass
print(done)
"""
    assert await probe(bubblewrap, confined, code) == "['/workspace', '/home/agent', '/tmp']\n"
    assert (tmp_path / "home" / "file").exists()


async def test_too_many_threads_end_it(bubblewrap: Bubblewrap, confined: Make) -> None:
    code = (
        "import threading\nstop = threading.Event()\n"
        "while True: threading.Thread(target=stop.wait, daemon=True).start()"
    )
    output = Output()
    exit_ = await run(bubblewrap, confined(sys.executable, "-c", code), output, timeout_s=30.0)
    assert (exit_.kind, exit_.code) == ("exited", 137)
    assert exit_.detail == "all of it was killed: more than harness.limits.threads = 2048"
    assert exit_.detail in output.tail().replace("all were", "all of it was")


async def test_other_processes_are_not_seen(bubblewrap: Bubblewrap, confined: Make) -> None:
    code = (
        "import os\nprint(len([p for p in os.listdir('/proc') if p.isdecimal()]), os.getuid(), os.getlogin)"
    )
    assert (await probe(bubblewrap, confined, code)).startswith("2 1000")


async def test_it_has_no_capabilities(bubblewrap: Bubblewrap, confined: Make) -> None:
    text = await probe(bubblewrap, confined, "print(open('/proc/self/status').read())")
    assert "CapEff:\t0000000000000000" in text
    assert "CapBnd:\t0000000000000000" in text


async def serve_once(path: Path, answer: bytes, begin: Callable[[], object] = bool) -> None:
    """A server on a new socket that greets one connection and is gone; `begin`: once it listens."""
    served = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()
        served.set()

    async with await asyncio.start_unix_server(serve, path):
        begin()
        await served.wait()


TALK = """
import json, socket
def talk(*lines):
    with socket.create_connection(("127.0.0.1", 4181), timeout=10) as s:
        file = s.makefile("rwb")
        answers = []
        for line in lines:
            file.write(line + b"\\n")
            file.flush()
            answers.append(file.readline().decode().strip())
        return answers
"""


async def test_the_proxy_can_be_reached(bubblewrap: Bubblewrap, confined: Make, proxy: Path) -> None:
    code = TALK + "print(json.dumps([talk(b'one', b'two'), talk(b'three')]))"
    assert json.loads(await probe(bubblewrap, confined, code, proxy)) == [["ONE", "TWO"], ["THREE"]]
    assert bubblewrap.base_url("http://127.0.0.1:9/v1") == "http://127.0.0.1:4181/v1"


async def test_much_goes_through_both_ways(bubblewrap: Bubblewrap, confined: Make, proxy: Path) -> None:
    code = TALK + "a, = talk(b'x' * 60000)\nprint(a == 'X' * 60000)\nprint(len(talk(*[b'line'] * 500)))"
    assert await probe(bubblewrap, confined, code, proxy) == "True\n500\n"


async def test_an_end_of_the_proxy_is_seen_inside(
    bubblewrap: Bubblewrap, confined: Make, proxy: Path
) -> None:
    code = TALK + "print(talk(b'bye', b'more'))"
    assert await probe(bubblewrap, confined, code, proxy) == "['BYE', '']\n"


async def test_a_hang_up_is_seen_by_the_proxy(bubblewrap: Bubblewrap, confined: Make, tmp_path: Path) -> None:
    seen = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        assert await reader.read() == b""
        seen.set()
        writer.close()

    path = tmp_path / "proxy" / "socket"
    path.parent.mkdir()
    async with await asyncio.start_unix_server(serve, path):
        code = (
            "import socket, time\ns = socket.create_connection(('127.0.0.1', 4181))\n"
            "s.sendall(b'request\\n')\ns.close()\ntime.sleep(0.2)"
        )
        await probe(bubblewrap, confined, code, path)
        async with asyncio.timeout(20):
            await seen.wait()


async def test_a_proxy_that_comes_back_is_reached_again(
    bubblewrap: Bubblewrap, confined: Make, tmp_path: Path
) -> None:
    """Its socket is another file then."""
    path = tmp_path / "proxy" / "socket"
    os.mkdir(path.parent)
    code = (
        "import socket, sys\nfor turn in 'ab':\n"
        "    print(socket.create_connection(('127.0.0.1', 4181)).recv(9).decode(), flush=True)\n"
        "    open(turn, 'w').close()\n"
        "    while turn == 'a' and not os.path.exists('go'): time.sleep(0.01)"
    )
    output = Output()
    command = confined(sys.executable, "-c", f"import os, time\n{code}", socket=path)
    task = asyncio.create_task(run(bubblewrap, command, output, timeout_s=30.0))
    await serve_once(path, b"first")
    os.unlink(path)
    await serve_once(path, b"second", (tmp_path / "workspace" / "go").touch)
    assert (await task).code == 0
    assert output.tail() == "first\nsecond\n"


def test_a_death_of_the_job_is_a_death_of_the_sandbox(bubblewrap: Bubblewrap, tmp_path: Path) -> None:
    """The job is killed with kill -9 and cannot clean up."""
    job = f"""
import subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from gyre.harness.bubblewrap import Bubblewrap, python_folders
argv = Bubblewrap(Path({str(tmp_path / "sandbox")!r}))._root()
subprocess.Popen([*argv, "--", "sh", "-c", "echo started; sleep 100 & sleep 100"])
sys.stdin.read()
"""
    read, write = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", job], stdin=subprocess.PIPE, stdout=write)
    os.close(write)
    assert os.read(read, 100) == b"started\n"
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    # Everything in the sandbox holds the pipe open.
    assert os.read(read, 1) == b""
    os.close(read)


def test_without_bubblewrap_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxMissing, match=r"harness\.sandbox.*no program bwrap.*Debian package"):
        Bubblewrap(tmp_path).check()


def test_without_a_filter_of_system_calls_there_is_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp, "_MACHINES", {})
    with pytest.raises(SandboxMissing, match=r"no filter of system calls.*set it to 'process'"):
        Bubblewrap(tmp_path).check()


@pytest.mark.parametrize(
    ("told", "code", "exit_"),
    [
        ("started\nexit 5\n", 5, Exit(kind="exited", code=5)),
        ("started\nsignal 9\n", 137, Exit(kind="killed", signal=9)),
        ("started\n", -9, Exit(kind="killed", signal=9)),
        ("started\n", 137, Exit(kind="killed", signal=9)),
        ("failed it is not there\n", 127, Exit(kind="never_started", detail="it is not there")),
        ("", 1, Exit(kind="never_started", detail="said")),
        (
            "started\nfault OSError: no: file\nexit 137\n",
            137,
            Exit(
                kind="exited",
                code=137,
                detail=f"{KILLED} the sandbox's first process failed: OSError: no: file",
            ),
        ),
        *(
            (
                "started\n",
                code,
                Exit(
                    kind="exited",
                    code=137,
                    detail=f"{KILLED} the sandbox's first process failed: exit {code}",
                ),
            )
            for code in (1, 139)
        ),
    ],
)
def test_an_end_of_the_first_process_is_no_end_by_others(told: str, code: int, exit_: Exit) -> None:
    """Which gives another attempt, and is not to be had from inside."""
    assert exit_of(told, code, " said\n") == exit_


def test_where_namespaces_are_forbidden_bubblewraps_words_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxMissing, match="No permissions to create new namespace"):
        Bubblewrap(tmp_path / "sandbox").check()
