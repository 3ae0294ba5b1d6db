"""Real processes: started, killed, stopped, explained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gyre.actors import (
    ActorDied,
    ChildSpec,
    Follow,
    Node,
    NodeFailed,
    ProcessSpec,
    Ref,
    RemoteError,
    SpawnFailed,
    Supervisor,
    WhereIs,
)
from gyre.actors.transport import TransportName
from tests.actors.conftest import start
from tests.actors.test_supervisor import Follower
from tests.actors.zoo import (
    Add,
    AddToPeer,
    Bump,
    Count,
    Counter,
    CounterConfig,
    Crash,
    Hang,
    Incarnation,
    NestConfig,
    Nestlings,
    Observe,
    Observed,
    Observer,
    Overflow,
    Pid,
    Quit,
    Raise,
)


def spec(name: str = "p", actor: str = "Counter", **options: object) -> ProcessSpec:
    defaults = {"config": CounterConfig(), "restart": "temporary", "shutdown_s": 20.0}
    return ProcessSpec(name=name, actor=f"tests.actors.zoo:{actor}", **{**defaults, **options})  # type: ignore[arg-type]


@pytest.fixture(params=["unix", "tcp"])
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    transport: TransportName = request.param
    async with Node(name="test", transport=transport) as node:
        yield node
    assert node.processes.all() == []


@pytest.fixture
async def unix_node() -> AsyncIterator[Node]:
    async with Node(name="test") as node:
        yield node


async def gone(pid: int) -> bool:
    """Waits for the end of a process that need not be a child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        loop = asyncio.get_running_loop()
        return bool(await loop.run_in_executor(None, lambda: select.select([fd], [], [], 30)[0]))
    finally:
        os.close(fd)


async def observe(node: Node, ref: Ref) -> Ref:
    observer = await start(node, Observer(), "observer")
    await observer.tell(Observe(ref=ref))
    await observer.ask(Observed(count=0))
    return observer


async def test_an_actor_in_a_process_of_its_own(node: Node) -> None:
    here = await start(node, Counter())
    ref = await node.spawn(spec(config=CounterConfig(start=10, peer=here, folder=Path("/x"))))
    assert await ref.ask(Pid()) != os.getpid()
    assert await ref.ask(Add(amount=1)) == 11
    assert await ref.ask(AddToPeer(amount=5)) == 5
    assert [item async for item in ref.stream(Count(upto=100))] == [*range(100)]


async def test_processes_ask_each_other(node: Node) -> None:
    first = await node.spawn(spec("first"))
    second = await node.spawn(spec("second", config=CounterConfig(peer=first)))
    assert await second.ask(AddToPeer(amount=5)) == 5
    assert await first.ask(Add(amount=0)) == 5


async def test_a_process_killed_is_dead_to_its_siblings_at_once(node: Node) -> None:
    first = await node.spawn(spec("first"))
    second = await node.spawn(spec("second", config=CounterConfig(peer=first)))
    observer = await observe(node, first)
    assert await second.ask(AddToPeer(amount=5)) == 5
    os.kill(await first.ask(Pid()), signal.SIGKILL)
    await observer.ask(Observed(count=1))
    for _ in range(2):
        with pytest.raises(RemoteError, match="first#1 died: lost") as caught:
            await second.ask(AddToPeer(amount=5))
        assert caught.value.type_name == "gyre.actors.errors:ActorDied"


async def test_wire_errors_cross_processes(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec(actor="Shop", config=None))
    with pytest.raises(Overflow) as caught:
        await ref.ask(Raise(which="overflow"))
    assert caught.value.window == 8


async def test_a_killed_process_is_known_at_once_with_its_signal(node: Node) -> None:
    ref = await node.spawn(spec())
    observer = await observe(node, ref)
    pid = await ref.ask(Pid())
    hanging = asyncio.create_task(ref.ask(Hang()))
    items = ref.stream(Count(upto=1000))
    await anext(items)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):  # what is only not heard of any more is given up after 20 s
        with pytest.raises(ActorDied, match=r"p#1 died: exit \(killed by SIGKILL\)") as caught:
            await hanging
    assert caught.value.reason.signal == "SIGKILL"
    with pytest.raises(ActorDied):
        async for _ in items:
            pass
    (down,) = await observer.ask(Observed(count=1))
    assert (down.ref, down.reason.signal) == (ref, "SIGKILL")
    with pytest.raises(ActorDied, match="SIGKILL"):
        await ref.ask(Add(amount=1))
    await ref.tell(Bump())
    assert node.dead_letters.count == 1


async def test_an_exit_code_and_the_last_lines_are_told(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec(actor="Talker"))
    await observe(unix_node, ref)
    with pytest.raises(ActorDied, match=r"exit code 9(.|\n)*the last words") as caught:
        await ref.ask(Hang())
    assert caught.value.reason.exit_code == 9
    assert caught.value.reason.stderr_tail[-1] == "the last words"


async def test_output_goes_to_the_log_and_the_tail_is_of_this_life(unix_node: Node, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "p.log"
    log.parent.mkdir()
    log.write_text("from another life\n")
    ref = await unix_node.spawn(spec(actor="Talker", log_path=log))
    await observe(unix_node, ref)
    with pytest.raises(ActorDied) as caught:
        await ref.ask(Hang())
    assert "from another life" not in caught.value.reason.stderr_tail
    assert log.read_text().startswith("from another life\nfirst line\n")


async def test_a_crash_is_told_with_its_traceback(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec())
    observer = await observe(unix_node, ref)
    await ref.tell(Crash(text="bang"))
    (down,) = await observer.ask(Observed(count=1))
    assert (down.reason.kind, down.reason.type_name, down.reason.message) == ("error", "ValueError", "bang")
    assert "in crash" in down.reason.traceback
    with pytest.raises(ActorDied, match="ValueError: bang"):
        await ref.ask(Add(amount=1))


async def test_a_crash_nobody_watches_fails_the_node() -> None:
    with pytest.raises(NodeFailed, match="ValueError: bang"):
        async with Node(name="test") as node:
            ref = await node.spawn(spec())
            await ref.tell(Crash(text="bang"))
            await node.failed()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"actor": "Talker", "config": CounterConfig(start=1)}, "ValueError: no start today"),
        ({"actor": "Talker", "config": CounterConfig(start=2)}, r"exit code 7(.|\n)*the last words"),
        ({"actor": "Nobody"}, "has no attribute 'Nobody'"),
        ({"actor": "Add"}, "is no Actor"),
        ({"config": None}, "this is no CounterConfig: Expected `object`, got `None`"),
        (
            {"actor": "Talker", "config": CounterConfig(start=3), "start_timeout_s": 1.5},
            "had not started after 1.5 s",
        ),
    ],
)
async def test_a_start_that_fails_says_why(unix_node: Node, options: dict[str, object], why: str) -> None:
    with pytest.raises(SpawnFailed, match=why):
        await unix_node.spawn(spec(**options))  # type: ignore[arg-type]
    assert unix_node.processes.all() == []


async def test_an_actor_that_stops_itself_ends_its_process(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec())
    observer = await observe(unix_node, ref)
    await ref.tell(Quit())
    (down,) = await observer.ask(Observed(count=1))
    assert down.reason.kind == "normal"
    with pytest.raises(ActorDied, match="normal"):
        await ref.ask(Add(amount=1))


async def test_stopping_is_asked_for_first(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec())
    observer = await observe(unix_node, ref)
    pid = await ref.ask(Pid())
    await unix_node.stop(ref)
    (down,) = await observer.ask(Observed(count=1))
    assert down.reason.kind == "stopped"
    assert await gone(pid)
    with pytest.raises(ActorDied, match=r"stopped \(exit code 0\)"):
        await ref.ask(Add(amount=1))


async def test_one_that_does_not_stop_is_killed(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec(actor="Stubborn", shutdown_s=0.5))
    pid = await ref.ask(Pid())
    async with asyncio.timeout(20):
        await unix_node.stop(ref)
    assert await gone(pid)


async def test_one_that_is_stopped_by_sigstop_is_killed(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec(shutdown_s=0.3))
    pid = await ref.ask(Pid())
    os.kill(pid, signal.SIGSTOP)
    await unix_node.stop(ref)
    assert await gone(pid)


async def test_sigterm_stops_it_gracefully(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec())
    observer = await observe(unix_node, ref)
    os.kill(await ref.ask(Pid()), signal.SIGTERM)
    (down,) = await observer.ask(Observed(count=1))
    assert down.reason.kind == "stopped"


async def test_a_supervisor_gives_the_next_life_a_new_process(unix_node: Node) -> None:
    follower = Follower()
    follows = await start(unix_node, follower, "follower")
    child = spec(restart="permanent")
    top = await unix_node.spawn(ChildSpec(name="top", start=lambda: Supervisor([child])))
    await top.tell(Follow(watcher=follows))
    old = await top.ask(WhereIs(name="p"))
    assert old is not None
    os.kill(await old.ask(Pid()), signal.SIGKILL)
    restarted = await follower.restarts.get()
    assert restarted.old == old
    assert await restarted.ref.ask(Incarnation()) == 2
    with pytest.raises(ActorDied):
        await old.ask(Add(amount=1))


async def test_the_environment_is_set_and_ours_is_not_leaked(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec(actor="Environ", environment={"GYRE_TEST": "yes"}))
    from tests.actors.zoo import GetEnv

    assert await ref.ask(GetEnv(name="GYRE_TEST")) == "yes"
    assert await ref.ask(GetEnv(name="PYTHONPATH")) == os.environ.get("PYTHONPATH")


async def test_what_a_process_leaves_of_its_group_ends_with_it(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec(actor="Nest", config=NestConfig()))
    await observe(unix_node, ref)
    outer, inner, loose = await ref.ask(Nestlings())
    os.kill(outer, signal.SIGKILL)
    assert await gone(inner)
    assert await gone(loose)


async def test_a_nested_process_is_stopped_with_its_parent(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec(actor="Nest", config=NestConfig()))
    pids = await ref.ask(Nestlings())
    await unix_node.stop(ref)
    assert all([await gone(pid) for pid in pids])


ROOT = """
import asyncio, sys
from gyre.actors import Node, ProcessSpec, run
from tests.actors.zoo import NestConfig, Nestlings

async def main():
    async with Node(name="root") as node:
        ref = await node.spawn(ProcessSpec(name="nest", actor="tests.actors.zoo:Nest", config=NestConfig()))
        print(*(await ref.ask(Nestlings())), flush=True)
        await asyncio.Event().wait()

run(main())
"""


async def test_kill_9_of_the_root_leaves_no_process() -> None:
    root = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ROOT, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert root.stdout is not None
    pids = [int(pid) for line in [await read_pids(root.stdout)] for pid in line]
    os.kill(root.pid, signal.SIGKILL)
    await root.wait()
    outer, inner, loose = pids
    try:
        assert await gone(outer)
        assert await gone(inner)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(loose, signal.SIGKILL)  # no child of ours: nobody is left to kill its group


async def read_pids(out: asyncio.StreamReader) -> list[str]:
    while True:
        words = (await out.readline()).decode().split()
        if len(words) == 3 and all(word.isdigit() for word in words):
            return words


async def test_an_idle_process_sleeps(unix_node: Node) -> None:
    ref = await unix_node.spawn(spec())
    pid = await ref.ask(Pid())
    used = []
    for _ in range(10):  # at best: late work of their start, or of other threads of ours, is not theirs
        before, ours = cpu_s(pid), time.process_time()
        await asyncio.sleep(1.0)
        used.append((cpu_s(pid) - before, time.process_time() - ours))
        if used[-1][0] <= 0.01 and used[-1][1] < 0.02:
            return
    raise AssertionError(f"seconds of CPU in each second, its and ours: {used}")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("otherwise", [{"fork": True}, {"node": Ref.__new__(Ref)}])
def test_what_inherits_descriptors_is_started_here(otherwise: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="neither forked nor elsewhere"):
        ProcessSpec(name="a", actor="a:A", inherits=(0,), **otherwise)  # type: ignore[arg-type]
