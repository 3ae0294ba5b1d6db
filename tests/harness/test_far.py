"""Executions on another machine, which is a node of this process; what plays there is a real process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gyre.actors import ChildSpec, Node, Ref, RemoteError
from gyre.harness.actor import HarnessActor, HarnessActorConfig
from gyre.harness.config import EvalConfig, EvaluatorConfig, HarnessConfig, TasksConfig
from gyre.harness.far import JoinHarness, LeaveHarness
from gyre.trajectory.records import ExecutionOpened
from tests.harness.conftest import needs_bwrap
from tests.harness.formats.folders import HARBOR, write
from tests.harness.neighbours import EMPTY, Job, Neighbours

TOKEN = b"the token that all these nodes hold"
# Asks the policy, and notes the answer.
ASKS = """
import os, urllib.request
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models")
asked.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
open("answer", "w").write(urllib.request.urlopen(asked).read().decode())
"""
FINDS = """
import os
open("answer", "w").write(os.getcwd() + " " + os.environ["MODE"])
"""
# The group's first execution tells whose child it is, and does not end, but the second time.
HANGS = """
import os, sys, time
fifo = sys.argv[1]
if os.environ["GYRE_EXECUTION"].endswith(".00") and os.path.exists(fifo):
    with open(fifo, "w") as out:
        os.unlink(fifo)
        out.write(str(os.getppid()))
    time.sleep(3600)
"""
# What ends with its machine is no attempt.
ONCE = {"concurrent": 1, "attempts": 1, "refills": 0}
SCORE = "import os, sys; print(float(os.path.exists(sys.argv[1] + '/answer')))"


class FarJob(Job):
    """Others reach it at `endpoint`."""

    def __init__(self, ref: Ref, neighbours: Neighbours, run_dir: Path, endpoint: str) -> None:
        super().__init__(ref, neighbours, run_dir)
        self.endpoint = endpoint


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A policy that answers with the key by which it is asked."""
    # On the relay's first connection, with which it looks for the proxy, nothing is said.
    with suppress(asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        (key,) = [line.split()[-1] for line in head.split(b"\r\n") if line.startswith(b"Authorization")]
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(key), key))
    writer.close()


@asynccontextmanager
async def playing(tmp_path: Path, script: str = ASKS, *words: str, **harness: Any) -> AsyncIterator[FarJob]:
    """A job whose node others may join; its tasks' folder may be there already."""
    if not (tmp_path / "tasks").exists():
        write(tmp_path / "tasks" / "a", {"prompt.md": "do it"})
    (tmp_path / "run" / "logs").mkdir(parents=True)
    if not {"actor", "preset"} & harness.keys():
        harness["command"] = ("{python}", "-I", "-S", "-c", script, *words)
    config = HarnessActorConfig(
        harness=HarnessConfig(**{"sandbox": "process", "keep": True, **harness}),
        tasks=TasksConfig(path=tmp_path / "tasks"),
        evaluator=EvaluatorConfig(command=("{python}", "-c", SCORE, "{workspace}"), sandbox="process"),
        eval=EvalConfig(),
        group_size=2,
        run_dir=tmp_path / "run",
    )
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Node("root", transport="tcp", token=TOKEN) as root:
        endpoint = await root.listen()
        neighbours = Neighbours(EMPTY)
        neighbours.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        beside = await root.spawn(ChildSpec(name="beside", start=lambda: neighbours))
        start = partial(HarnessActor, config, beside, beside, beside)
        ref = await root.spawn(ChildSpec(name="harness", start=start, restart="temporary", shutdown_s=30))
        yield FarJob(ref, neighbours, config.run_dir, endpoint)


@asynccontextmanager
async def machine(job: FarJob) -> AsyncIterator[tuple[Ref, Ref]]:
    """Itself, as the job knows it, and the HarnessActor."""
    async with Node("machine", transport="tcp", token=TOKEN) as node:
        await node.listen()
        root = await node.reach(job.endpoint)
        harness = await node.find("harness", at=root)
        desk = node.neighbours.desk()
        assert harness is not None
        assert desk is not None
        yield desk.ref, harness


@needs_bwrap
async def test_executions_wait_for_a_machine_and_are_played_there(tmp_path: Path) -> None:
    async with playing(tmp_path, sandbox="bubblewrap", here=False) as job:
        await job.dispatch()
        async with machine(job) as (node, harness):
            await harness.ask(JoinHarness(node=node, executions=2))
            results = await job.results(2)
        assert [(r.reason, r.score, r.detail) for r in results] == [("completed", 1.0, "")] * 2
        for result in results:
            answered = job.file(result.execution, "workspace") / "answer"
            assert answered.read_text() == f"key-{result.execution}-1"
        assert job.file("g000000.00", "harness.log").exists()


@needs_bwrap
async def test_a_task_is_there_what_it_is_here(tmp_path: Path) -> None:
    write(tmp_path / "tasks" / "a", HARBOR)
    async with playing(tmp_path, FINDS, sandbox="bubblewrap", here=False) as job:
        await job.dispatch()
        async with machine(job) as (node, harness):
            await harness.ask(JoinHarness(node=node, executions=2))
            for result in await job.results(2):
                answered = job.file(result.execution, "workspace") / "answer"
                assert answered.read_text() == "/app fast"


async def test_what_a_lost_process_played_is_played_again_here(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with playing(tmp_path, HANGS, str(fifo), **ONCE) as job, machine(job) as (node, harness):
        await harness.ask(JoinHarness(node=node, executions=2))
        await job.dispatch()
        pid = int(await asyncio.to_thread(fifo.read_text))
        assert pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        results = await job.results(2)
        opened = [message.spec for message in job.neighbours.of(ExecutionOpened)]
    assert [result.reason for result in results] == ["completed"] * 2
    assert [spec.attempt for spec in opened if spec.execution == "g000000.00"] == [1, 2]


async def test_a_machine_that_leaves_gives_back_what_it_plays(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with playing(tmp_path, HANGS, str(fifo), **ONCE) as job, machine(job) as (node, harness):
        await harness.ask(JoinHarness(node=node, executions=2))
        await job.dispatch()
        pid = int(await asyncio.to_thread(fifo.read_text))
        await harness.ask(LeaveHarness(node=node))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        results = await job.results(2)
    assert [result.reason for result in results] == ["completed"] * 2


@pytest.mark.parametrize(
    ("harness", "why"),
    [
        ({"actor": "tests.harness.harnesses:Scripted"}, "its harness is an actor"),
        ({"preset": "codex", "program": Path("/no/such/codex"), "here": False}, "no program /no/such/codex"),
    ],
)
async def test_a_machine_that_cannot_play_is_told_why(
    harness: dict[str, Any], why: str, tmp_path: Path
) -> None:
    async with playing(tmp_path, **harness) as job, machine(job) as (node, ref):
        with pytest.raises(RemoteError, match=why):
            await ref.ask(JoinHarness(node=node, executions=1))


async def test_a_proxy_that_only_this_machine_reaches_is_said_to_be_one(tmp_path: Path) -> None:
    async with playing(tmp_path) as job:
        elsewhere = Ref("f" * 16, "tcp:10.0.0.2:7000", 1, "elsewhere", 1, job.ref.target)
        with pytest.raises(RemoteError, match=r"the proxy listens at 127\.0\.0\.1 only; set harness\.proxy"):
            await job.ref.ask(JoinHarness(node=elsewhere, executions=1))
        await job.dispatch()
        assert [result.reason for result in await job.results(2)] == ["completed"] * 2
