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
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.actors import ActorDied, AwaitChild, ChildSpec, Node, ProcessSpec, Ref, SpawnFailed, Supervisor
from gyre.actors.forking.keeper import MOST_DEATHS, ForkServer
from gyre.actors.forking.messages import FORK_SERVER, Refused, memory_file, received_reply
from tests.actors.conftest import start
from tests.actors.forking.mirror import Draw, Parent, Self
from tests.actors.test_process import gone, observe, read_pids
from tests.actors.zoo import (
    CounterConfig,
    GetEnv,
    Hang,
    NestConfig,
    Nestlings,
    Observe,
    Observed,
    Observer,
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
        shutdown_s=3.0,
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
    assert await forked.ask(Self()) == await executed.ask(Self())


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


async def test_what_a_fork_leaves_of_its_group_ends_with_it_or_with_the_server(node: Node) -> None:
    server = await serve(node)
    refs = [await node.spawn(spec(name, "zoo:Nest", config=NestConfig())) for name in ("a", "b")]
    observer = await observe(node, refs[0])
    await observer.tell(Observe(ref=refs[1]))
    for ref, kill in zip(refs, (None, pid_of(server)), strict=True):
        outer, inner, loose = await ref.ask(Nestlings())
        os.kill(kill or outer, signal.SIGKILL)
        assert all([await gone(pid) for pid in (outer, inner, loose)])
    downs = await observer.ask(Observed(count=2))
    assert [down.reason.signal for down in downs] == ["SIGKILL", "SIGKILL"]


async def test_another_server_follows_one_that_dies_but_not_for_ever(node: Node) -> None:
    server = await serve(node)
    observer = await start(node, Observer(), "observer")
    for death in range(1, MOST_DEATHS + 1):
        old = pid_of(server)
        ref = await mirror(node, f"a{death}")
        assert await ref.ask(Parent()) == old
        await observer.tell(Observe(ref=ref))
        await observer.ask(Observed(count=0))
        os.kill(old, signal.SIGKILL)
        await observer.ask(Observed(count=death))
        assert await gone(old)
    ref = await mirror(node, "without")
    assert await ref.ask(Parent()) == os.getpid()
    assert node.fork_server == ""


async def test_all_that_a_dead_server_had_forked_come_back(node: Node) -> None:
    """At once, as the cells of a job do. Who asks before the next server listens is executed."""
    server = await serve(node)
    names = ("a", "b", "c")
    specs = [replace(spec(name, "forking.mirror:Mirror"), restart="permanent") for name in names]
    top = await node.spawn(ChildSpec(name="top", start=lambda: Supervisor(specs, max_restarts=3)))
    before = [await top.ask(AwaitChild(name=name)) for name in names]
    old = pid_of(server)
    assert [await ref.ask(Parent()) for ref in before] == [old] * 3
    os.kill(old, signal.SIGKILL)
    after = [await top.ask(AwaitChild(name=name, after=ref)) for name, ref in zip(names, before, strict=True)]
    assert {await ref.ask(Parent()) for ref in after} <= {pid_of(server), os.getpid()}
    assert await (await mirror(node, "d")).ask(Parent()) == pid_of(server) != old


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
    assert said.split()[-2:] == [b"SIGKILL", b"SIGTERM"]


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

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(min_size=1), st.binary(max_size=64), st.integers(0, 2))
    def garbage(data: bytes, content: bytes, files: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(node.fork_server)
            file = memory_file(content)
            socket.send_fds(client, [data], [file] * files)
            os.close(file)
            assert isinstance(received_reply(client), Refused)

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


async def test_kill_9_of_the_root_leaves_neither_server_nor_fork() -> None:
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
    os.kill(root.pid, signal.SIGKILL)
    await root.wait()
    assert all([await gone(pid) for pid in pids])


async def test_who_asked_dies_and_what_it_asked_for(node: Node) -> None:
    """Of another process than that which has the server."""
    server = await serve(node)
    forker = await node.spawn(spec("forker", "zoo:Nest", config=NestConfig(fork=True), fork=False))
    observer = await observe(node, forker)
    outer, inner, _ = await forker.ask(Nestlings())
    assert children(pid_of(server)).split() == [str(inner)]
    os.kill(outer, signal.SIGKILL)
    assert await gone(inner)
    await observer.ask(Observed(count=1))
    await until_childless(pid_of(server))


async def until_childless(pid: int) -> None:
    """It reaps what has ended as soon as it hears that nobody asks for it any more."""
    await until(lambda: not children(pid))


async def until(there: Callable[[], bool]) -> None:
    """Of what no event tells."""
    async with asyncio.timeout(5):
        while not there():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
