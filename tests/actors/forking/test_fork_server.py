"""What is forked is what an exec would have made of it, or it is not forked."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.actors import ActorDied, ChildSpec, Node, ProcessSpec, Ref, SpawnFailed
from gyre.actors.forking.keeper import MOST_DEATHS, ForkServer
from gyre.actors.forking.messages import FORK_SERVER, Refused, memory_file, received_reply
from tests.actors.forking.conftest import ENDS_ARE_KNOWN
from tests.actors.forking.mirror import LIFE, Draw, Parent, Self
from tests.actors.test_process import gone, observe, read_pids
from tests.actors.zoo import (
    CounterConfig,
    GetEnv,
    Hang,
    NestConfig,
    Nestlings,
    Observe,
    Observed,
    Pid,
)

MODULES = ("tests.actors.forking.mirror", "tests.actors.zoo")
ROOT = Path(__file__).parents[3]


def spec(name: str, actor: str = "zoo:Environ", *, fork: bool = True, **options: object) -> ProcessSpec:
    if actor != "forking.mirror:Mirror":
        options = {"config": CounterConfig(), **options}
    return ProcessSpec(  # type: ignore[arg-type]
        name=name,
        actor=f"tests.actors.{actor}",
        restart="temporary",
        shutdown_s=20.0,
        fork=fork,
        **options,
    )


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.delenv(FORK_SERVER, raising=False)
    async with Node(name="test") as node:
        yield node
    assert node.processes.all() == []


async def serve(node: Node, *modules: str) -> ForkServer:
    server = ForkServer(modules or MODULES, {"OMP_NUM_THREADS": "1"})
    await node.spawn(ChildSpec(name="fork-server", start=lambda: server))
    return server


def pid_of(server: ForkServer) -> int:
    assert server._process is not None
    return server._process.pid


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


async def mirror(node: Node, name: str, **options: object) -> Ref:
    return await node.spawn(spec(name, "forking.mirror:Mirror", **options))  # type: ignore[arg-type]


async def test_a_fork_is_what_an_exec_would_have_made(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORK_TEST_GONE", "FORK_TEST_OTHER"):
        monkeypatch.setenv(name, "of the server")
    server = await serve(node)
    monkeypatch.delenv("FORK_TEST_GONE")
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "FORK_TEST_OTHER": "its own",
        "FORK_TEST_NEW": "its own too",
    }
    log = tmp_path / "log"
    forked = await mirror(node, "forked", environment=environment, log_path=log)
    executed = await mirror(node, "executed", environment=environment, log_path=log, fork=False)
    assert await forked.ask(Parent()) == pid_of(server)
    assert await executed.ask(Parent()) == os.getpid()
    its, of_executed = await forked.ask(Self()), await executed.ask(Self())
    assert its["open"].count(repr(LIFE)) == 1
    assert {**its, "open": its["open"].replace(f"{LIFE!r}, ", "")} == of_executed


async def test_forks_draw_other_numbers(node: Node) -> None:
    await serve(node)
    drawn = [await (await mirror(node, name)).ask(Draw()) for name in ("a", "b")]
    assert all(one != other for one, other in zip(*drawn, strict=True))


async def test_ends_are_told_with_code_signal_and_last_words(node: Node, tmp_path: Path) -> None:
    server = await serve(node)
    talker = await node.spawn(spec("talker", "zoo:Talker", log_path=tmp_path / "log"))
    counter = await node.spawn(spec("counter", "zoo:Counter"))
    observer = await observe(node, talker)
    await observer.tell(Observe(ref=counter))
    with pytest.raises(ActorDied, match=r"exit code 9(.|\n)*the last words"):
        await talker.ask(Hang())
    os.kill(await counter.ask(Pid()), signal.SIGKILL)
    with pytest.raises(ActorDied, match="SIGKILL"):
        await counter.ask(Hang())
    await observer.ask(Observed(count=2))
    await until_childless(pid_of(server))


@pytest.mark.parametrize("dies", [False, True], ids=["", "its server has died"])
async def test_what_a_fork_leaves_of_its_group_ends_with_it(node: Node, dies: bool) -> None:
    server = await serve(node)
    ref = await node.spawn(spec("a", "zoo:Nest", config=NestConfig()))
    observer = await observe(node, ref)
    outer, inner, loose = await ref.ask(Nestlings())
    if dies:
        await another(server)
    os.kill(outer, signal.SIGKILL)
    assert all([await gone(pid) for pid in (outer, inner, loose)])
    (down,) = await observer.ask(Observed(count=1))
    assert down.reason.signal == "SIGKILL" or (dies and not ENDS_ARE_KNOWN)


async def test_forks_outlive_their_server_and_another_forks_the_next(node: Node, tmp_path: Path) -> None:
    server = await serve(node)
    talker = await node.spawn(spec("talker", "zoo:Talker", log_path=tmp_path / "log"))
    stopped, killed = [await node.spawn(spec(name, "zoo:Counter")) for name in ("stopped", "killed")]
    pids = [await ref.ask(Pid()) for ref in (stopped, killed)]
    observer = await observe(node, talker)
    for ref in (stopped, killed):
        await observer.tell(Observe(ref=ref))
    await another(server)
    for name in ("a", "b"):
        assert await (await mirror(node, name)).ask(Parent()) == pid_of(server)
    assert [await ref.ask(Pid()) for ref in (stopped, killed)] == pids
    assert await observer.ask(Observed(count=0)) == ()
    with pytest.raises(ActorDied, match="the last words"):
        await talker.ask(Hang())
    await node.stop(stopped)
    (process,) = [process for process in node.processes.all() if process.ref == killed]
    process.kill()
    downs = {down.ref: down.reason for down in await observer.ask(Observed(count=3))}
    assert downs[stopped].kind == "stopped"
    assert not ENDS_ARE_KNOWN or (downs[talker].exit_code, downs[killed].signal) == (9, "SIGKILL")
    assert all([await gone(pid) for pid in pids])


async def test_another_server_follows_one_that_dies_but_not_for_ever(node: Node) -> None:
    server = await serve(node)
    forks = []
    for _ in range(MOST_DEATHS):
        ref = await mirror(node, f"a{len(forks)}")
        assert await ref.ask(Parent()) == pid_of(server)
        forks.append(ref)
        old = pid_of(server)
        os.kill(old, signal.SIGKILL)
        await until(lambda old=old: not node.fork_server or has_another(server, old))
    assert node.fork_server == ""
    ref = await mirror(node, "without")
    assert await ref.ask(Parent()) == os.getpid()
    assert len({await fork.ask(Parent()) for fork in forks}) == 1  # of all that have lost theirs


IN_ITS_OWN_PIDS = ("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
HAS_PIDS = ("sh", "-c", "echo 100 > /proc/sys/kernel/ns_last_pid")


def numbers_can_be_had_again() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run([*IN_ITS_OWN_PIDS, *HAS_PIDS]).returncode


@pytest.mark.skipif(not numbers_can_be_had_again(), reason="no namespace of pids can be had here")
async def test_who_has_its_number_after_it_is_not_killed() -> None:
    process = await asyncio.create_subprocess_exec(
        *(*IN_ITS_OWN_PIDS, sys.executable, "-m", "tests.actors.forking.reused"),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != FORK_SERVER},
    )
    said, _ = await process.communicate()
    assert said.split()[-2:] == [b"SIGKILL" if ENDS_ARE_KNOWN else b"None", b"SIGTERM"]


@pytest.mark.parametrize(
    ("modules", "options", "why"),
    [
        (("tests.actors.forking.leaves_thread",), {}, "an import has left 2 threads"),
        (("tests.actors.forking.opens_file",), {}, "an import has opened .*/dev/zero"),
        (("tests.actors.forking.fails",), {}, "ImportError: not today"),
        (MODULES, {"environment": {"OMP_NUM_THREADS": "2"}}, "its OMP_NUM_THREADS is '2', not '1'"),
        (MODULES, {"environment": {"MALLOC_ARENA_MAX": "2"}}, "its MALLOC_ARENA_MAX is '2', not None"),
        (
            ("tests.actors.forking.reads_variable",),
            {"environment": {"FORK_TEST_READ": "2"}},
            "its FORK_TEST_READ is '2', not None",
        ),
    ],
)
async def test_it_is_executed_where_a_fork_would_be_another(
    node: Node, modules: tuple[str, ...], options: dict[str, dict[str, str]], why: str
) -> None:
    await serve(node, *modules)
    with structlog.testing.capture_logs() as events:
        environment = {"OMP_NUM_THREADS": "1", **options.get("environment", {})}
        ref = await mirror(node, "a", environment=environment)
    assert await ref.ask(Parent()) == os.getpid()
    (reason,) = [event["reason"] for event in events if event["event"] == "not_forked"]
    assert re.search(why, reason)


async def test_it_is_executed_where_it_would_import_another_module_or_has_other_limits(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve(node)
    (tmp_path / "numpy.py").write_text("")
    with structlog.testing.capture_logs() as events:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            other_modules = await node.spawn(spec("a"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        try:
            other_limits = await mirror(node, "b")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await other_limits.ask(Parent()) == os.getpid()
        assert await other_modules.ask(GetEnv(name="OMP_NUM_THREADS")) == "1"
    first, second = [event["reason"] for event in events if event["event"] == "not_forked"]
    assert "its numpy is another than" in first
    assert "its Max open files is" in second


async def test_a_start_that_is_given_up_leaves_nothing(node: Node) -> None:
    server = await serve(node, "tests.actors.forking.mirror")
    os.kill(pid_of(server), signal.SIGSTOP)
    spawning = asyncio.create_task(mirror(node, "a"))
    await until(lambda: node.processes.all() != [])
    for process in node.processes.all():
        process.kill()
    with pytest.raises(SpawnFailed, match="stopped"):
        await spawning
    cancelled = asyncio.create_task(mirror(node, "b"))
    await until(lambda: node.processes.all() != [])
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert node.processes.all() == []
    os.kill(pid_of(server), signal.SIGCONT)
    assert await (await mirror(node, "c")).ask(Parent()) == pid_of(server)
    await node.stop(node.lookup("c"))
    await until_childless(pid_of(server))


async def test_garbage_is_refused(node: Node) -> None:
    server = await serve(node)

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=1), st.binary(max_size=64), st.integers(0, 3))
    def garbage(data: bytes, content: bytes, files: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(node.fork_server)
            file = memory_file(content)
            socket.send_fds(client, [data], [file] * files)
            os.close(file)
            assert isinstance(received_reply(client)[0], Refused)

    await asyncio.to_thread(garbage)
    assert await (await mirror(node, "a")).ask(Parent()) == pid_of(server)


SCRIPT = """
import asyncio
from gyre.actors import ChildSpec, Node, ProcessSpec, run
from gyre.actors.forking.keeper import MOST_DEATHS, ForkServer
from tests.actors.zoo import NestConfig, Nestlings

async def main():
    async with Node(name="root") as node:
        server = ForkServer(("tests.actors.zoo",), {})
        await node.spawn(ChildSpec(name="fork-server", start=lambda: server))
        spec = ProcessSpec(name="n", actor="tests.actors.zoo:Nest", config=NestConfig(), fork=True)
        outer, inner, loose = await (await node.spawn(spec)).ask(Nestlings())
        print(server._process.pid, outer, inner, flush=True)
        await asyncio.Event().wait()

run(main())
"""


@pytest.mark.parametrize("dies", [False, True], ids=["", "its server has died"])
async def test_kill_9_of_the_root_leaves_neither_server_nor_fork(dies: bool) -> None:
    root = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SCRIPT,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != FORK_SERVER},
    )
    assert root.stdout is not None
    pids = [int(pid) for pid in await read_pids(root.stdout)]
    assert children(pids[0]).split() == [str(pids[1])]
    if dies:
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: children(root.pid).split() not in ([str(pids[0])], []))
        pids += map(int, children(root.pid).split())
    os.kill(root.pid, signal.SIGKILL)
    await root.wait()
    assert all([await gone(pid) for pid in pids])


@pytest.mark.parametrize("dies", [False, True], ids=["", "its server has died"])
async def test_who_asked_dies_and_what_it_asked_for(node: Node, dies: bool) -> None:
    """Of another process than that which has the server."""
    server = await serve(node)
    forker = await node.spawn(spec("forker", "zoo:Nest", config=NestConfig(fork=True), fork=False))
    observer = await observe(node, forker)
    outer, inner, _ = await forker.ask(Nestlings())
    assert children(pid_of(server)).split() == [str(inner)]
    if dies:
        await another(server)
    os.kill(outer, signal.SIGKILL)
    assert await gone(inner)
    await observer.ask(Observed(count=1))
    await until_childless(pid_of(server))


async def another(server: ForkServer) -> None:
    """Kills it, and waits for the next."""
    old = pid_of(server)
    os.kill(old, signal.SIGKILL)
    assert await gone(old)
    await until(lambda: has_another(server, old))


def has_another(server: ForkServer, than: int) -> bool:
    return server._process is not None and server._process.pid != than


async def until_childless(pid: int) -> None:
    """It reaps what has ended as soon as it hears that nobody asks for it any more."""
    await until(lambda: not children(pid))


async def until(there: Callable[[], bool]) -> None:
    """Of what no event tells."""
    async with asyncio.timeout(30):
        while not there():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
