"""A user's actor as the harness of a job, in the root process and in one of its own."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.actors import NodeFailed, SpawnFailed
from gyre.harness import EvalConfig, EvaluatorConfig, HarnessConfig, Play, TasksConfig
from gyre.harness import actor as actor_module
from gyre.harness.actor import HarnessActorConfig
from gyre.harness.host import HarnessActorError, load_harness
from gyre.proxy.messages import CloseExecution, OpenExecution
from gyre.trajectory.records import ExecutionEnded, ExecutionOpened
from tests.harness.neighbours import Job, StartJob, running

COUNT_FILES = "import os, sys; print(len(os.listdir(sys.argv[1])) / 4)"
SCRIPTED = "tests.harness.harnesses:Scripted"


@pytest.fixture(params=[False, True], ids=["in the root process", "in its own"])
def start_job(request: pytest.FixtureRequest, tmp_path: Path) -> StartJob:
    """A job of one task, whose score is the number of files in the workspace / 4, one of which was given."""
    (tmp_path / "tasks" / "a" / "workspace").mkdir(parents=True)
    (tmp_path / "tasks" / "a" / "prompt.md").write_text("do it")
    (tmp_path / "tasks" / "a" / "workspace" / "given").touch()
    judge = ("{python}", "-I", "-S", "-c", COUNT_FILES, "{workspace}")
    own: dict[str, Any] = {"own_process": True, "environment": {"HARNESS_OF_ITS_OWN": "1"}}

    @asynccontextmanager
    async def start(
        how: str, tries: int = 1, actor: str = SCRIPTED, fifo: str = "", **harness: Any
    ) -> AsyncIterator[Job]:
        config = HarnessActorConfig(
            harness=HarnessConfig(
                actor=actor,
                options={"how": how, "tries": tries, "fifo": fifo},
                **{**(own if request.param else {}), **harness},
            ),
            tasks=TasksConfig(path=tmp_path / "tasks"),
            evaluator=EvaluatorConfig(command=judge, sandbox="process"),
            eval=EvalConfig(),
            group_size=2,
            run_dir=tmp_path / "run",
        )
        (tmp_path / "run" / "logs").mkdir(parents=True, exist_ok=True)
        async with running(config) as job:
            yield job

    return start


async def test_it_plays_each_execution_and_what_it_left_is_scored(start_job: StartJob) -> None:
    async with start_job("well") as job:
        await job.dispatch(groups=2)
        results = await job.results(4)
        closed = {message.execution for message in job.neighbours.of(CloseExecution)}
    assert [(r.reason, r.score, r.exit_code) for r in results] == [("completed", 0.5, 0)] * 4
    assert closed == {result.execution for result in results}


async def test_it_is_given_what_a_command_is(start_job: StartJob) -> None:
    async with start_job("well", timeout_s=33.0) as job:
        await job.dispatch()
        await job.results(2)
        log = job.file("g000000.01", "harness.log").read_text()
        play = msgspec.json.decode(log, type=Play, dec_hook=lambda kind, value: kind(value))
    assert play == Play(
        execution="g000000.01",
        attempt=1,
        task="a",
        prompt="do it",
        workspace=job.file("g000000.01", "workspace"),
        base_url="http://127.0.0.1:9/v1",
        key="key-g000000.01-1",
        model="policy",
        timeout_s=33.0,
        max_workspace_bytes=1 << 30,
    )


async def test_one_that_gives_up_is_scored_with_its_reason(start_job: StartJob) -> None:
    async with start_job("fails") as job:
        await job.dispatch()
        result, _ = await job.results(2)
    assert (result.reason, result.score, result.exit_code) == ("harness_error", 0.5, 1)
    assert result.detail == "gave up"


async def test_what_it_raises_ends_one_execution_and_is_logged(start_job: StartJob) -> None:
    async with start_job("raises") as job:
        await job.dispatch()
        result, _ = await job.results(2)
        said = job.file(result.execution, "harness.log").read_text()
        opened = job.neighbours.of(ExecutionOpened)
    assert (result.reason, result.score) == ("harness_error", 0.5)
    assert "no such thing" in result.detail
    assert 'raise LookupError("no such thing")' in said
    assert len(opened) == 2


async def test_it_is_scored_when_nothing_of_it_runs_any_more(start_job: StartJob) -> None:
    """It writes to its workspace when it is cancelled."""
    async with start_job("hangs", timeout_s=1.0) as job:
        await job.dispatch()
        results = await job.results(2)
    assert [(r.reason, r.score) for r in results] == [("harness_timeout", 0.75)] * 2


async def test_a_crash_of_it_loses_no_execution(start_job: StartJob) -> None:
    async with start_job("dies") as job:
        await job.dispatch()
        results = await job.results(2)
        attempts = [m.attempt for m in job.neighbours.of(OpenExecution)]
    assert [(r.reason, r.score) for r in results] == [("completed", 0.5)] * 2
    assert sorted(attempts) == [1, 1, 2, 2]


async def test_executions_are_scored_when_their_attempts_are_used_up(start_job: StartJob) -> None:
    async with start_job("dies", tries=2, attempts=2) as job:
        await job.dispatch()
        results = await job.results(2)
    assert [(r.reason, r.score) for r in results] == [("harness_error", 0.5)] * 2
    assert "its actor died" in results[0].detail


async def test_one_that_dies_without_end_ends_the_job_and_no_execution(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "HOST_RESTARTS", 2)
    with pytest.raises(NodeFailed) as failed:
        async with start_job("dies", tries=99, attempts=99) as job:
            await job.dispatch()
            await asyncio.Event().wait()
    assert job.neighbours.of(ExecutionEnded) == []
    assert "it broke" in str(failed.value.reason.first) or "SIGKILL" in str(failed.value.reason.first)


async def test_when_the_job_stops_its_plays_are_over(start_job: StartJob, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reading = os.open(tmp_path / "fifo", os.O_RDWR | os.O_NONBLOCK)
    async with start_job("hangs", fifo=str(tmp_path / "fifo")) as job:
        await job.dispatch()
        await two_bytes(reading)
    os.close(reading)
    assert [job.file(f"g000000.0{i}", "workspace/two").exists() for i in (0, 1)] == [True, True]
    assert job.neighbours.of(ExecutionEnded) == []


async def two_bytes(reading: int) -> None:
    loop, read, both = asyncio.get_running_loop(), bytearray(), asyncio.Event()

    def take() -> None:
        read.extend(os.read(reading, 2))
        if len(read) == 2:
            both.set()

    loop.add_reader(reading, take)
    await both.wait()
    loop.remove_reader(reading)


async def test_faults_of_the_actor_fail_the_start(start_job: StartJob) -> None:
    with pytest.raises(SpawnFailed, match=r"harness\.actor: no\.such\.module:Tidy cannot be imported"):
        async with start_job("well", actor="no.such.module:Tidy"):
            pass


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("Nobody", {}, r"harness\.actor: .*has no function 'Nobody'"),
        ("NoHarness", {}, r"harness\.actor: .* is no harness; derive it from gyre\.harness\.Harness"),
        ("Two", {}, r"harness\.actor: the constructor .* takes first, second; give it one argument"),
        ("Bare", {"a": 1}, r"harness\.options: .* takes none, found a"),
        (
            "Scripted",
            {"hwo": "well"},
            r"harness\.options\.hwo: unknown key; .* did you mean harness\.options",
        ),
        ("Scripted", {"tries": "3"}, r"harness\.options\.tries: Expected `int`, got `str`"),
    ],
)
def test_what_is_wrong_is_named_with_the_fix(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(HarnessActorError, match=says):
        load_harness(f"tests.harness.harnesses:{name}", options)


def test_a_file_of_the_job_folder_may_hold_it(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from pathlib import Path\n"
        "import msgspec\n"
        "from gyre.harness import Harness\n"
        "class Options(msgspec.Struct):\n    folder: Path\n"
        "class Own(Harness):\n"
        "    def __init__(self, options: Options) -> None:\n        self.options = options\n"
    )
    harness = load_harness(f"{file}:Own", {"folder": "/tmp/x"})()
    assert harness.options.folder == Path("/tmp/x")  # type: ignore[attr-defined]
