"""The HarnessActor with real harness processes; the rooms beside it are played by one actor."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import structlog.testing

from gyre.actors import NodeFailed, SpawnFailed
from gyre.harness import guardian
from gyre.harness.actor import HarnessActorConfig
from gyre.harness.config import (
    EvalConfig,
    EvaluatorConfig,
    HarnessConfig,
    PartConfig,
    PytestConfig,
    TasksConfig,
)
from gyre.harness.guardian import marked
from gyre.proxy.messages import CloseExecution, OpenExecution
from gyre.schedule.messages import ExecutionFinished, ExecutionsDispatched, ExecutionStarted
from gyre.trajectory.messages import IncompleteGroup, ResumeState
from gyre.trajectory.records import ExecutionEnded, ExecutionOpened
from tests.harness.conftest import needs_bwrap
from tests.harness.neighbours import EMPTY, Job, StartJob, running

COUNT_FILES = "import os, sys; print(min(1.0, len(os.listdir(sys.argv[1])) / 4))"


@pytest.fixture
def start_job(tmp_path: Path) -> StartJob:
    """A job of two tasks and one held-out task, whose score is the number of files in the workspace / 4."""
    for name in ("tasks/a", "tasks/b", "held-out/c"):
        (tmp_path / name / "workspace").mkdir(parents=True)
        (tmp_path / name / "prompt.md").write_text(f"the prompt of {name}")
        (tmp_path / name / "workspace" / "given").touch()

    @asynccontextmanager
    async def start(
        *command: str,
        resume: ResumeState = EMPTY,
        first_group: int = 0,
        group_size: int = 2,
        evaluator: dict[str, Any] | None = None,
        **harness: Any,
    ) -> AsyncIterator[Job]:
        judge = {"command": ("{python}", "-I", "-S", "-c", COUNT_FILES, "{workspace}"), "sandbox": "process"}
        config = HarnessActorConfig(
            harness=HarnessConfig(command=command, **{"sandbox": "process", "refills": 0, **harness}),
            tasks=TasksConfig(path=tmp_path / "tasks"),
            evaluator=EvaluatorConfig(**{**judge, **(evaluator or {})}),
            eval=EvalConfig(path=tmp_path / "held-out", runs=2),
            group_size=group_size,
            run_dir=tmp_path / "run",
            first_group=first_group,
        )
        async with running(config, resume) as job:
            yield job

    return start


@contextmanager
def events_seen_by(see: Callable[[Any], None]) -> Iterator[None]:
    """`see` is called with each event as it happens."""

    def processor(_: Any, __: str, event: Any) -> Any:
        see(event)
        raise structlog.DropEvent

    before = structlog.get_config()["processors"]
    structlog.configure(processors=[processor])
    try:
        yield
    finally:
        structlog.configure(processors=before)


def sh(code: str) -> tuple[str, ...]:
    return ("sh", "-c", code)


async def test_each_execution_of_a_group_is_scored(start_job: StartJob) -> None:
    async with start_job(*sh("touch one")) as job:
        await job.dispatch(groups=2)
        results = await job.results(4)
    names = [f"g00000{group}.0{index}" for group in (0, 1) for index in (0, 1)]
    assert [(r.execution, r.reason, r.score, r.exit_code) for r in results] == [
        (name, "completed", 0.5, 0) for name in names
    ]
    assert all(result.seconds > 0 for result in results)


async def test_the_rooms_beside_are_told_in_order(start_job: StartJob) -> None:
    async with start_job("true", group_size=1) as job:
        await job.dispatch()
        await job.results(1)
        kinds = [type(message) for message in job.neighbours.said]
        dispatched = job.neighbours.of(ExecutionsDispatched)[0]
        opened = job.neighbours.of(ExecutionOpened)[0].spec
        finished = job.neighbours.of(ExecutionFinished)[0]
    order = [
        ExecutionStarted,
        ExecutionOpened,
        OpenExecution,
        CloseExecution,
        ExecutionEnded,
        ExecutionFinished,
    ]
    assert [kind for kind in kinds if kind is not ExecutionsDispatched] == order
    assert (dispatched.split, dispatched.executions, dispatched.groups) == ("train", 1, 1)
    assert (opened.execution, opened.group, opened.attempt) == ("g000000.00", "g000000", 1)
    assert (finished.execution, finished.split) == ("g000000.00", "train")


async def test_a_harness_gets_address_key_prompt_and_workspace(start_job: StartJob) -> None:
    code = "echo $ANTHROPIC_BASE_URL $ANTHROPIC_API_KEY;"
    code += "echo $OPENAI_BASE_URL $OPENAI_API_KEY $GYRE_EXECUTION $GYRE_TASK $X; cat $GYRE_PROMPT_FILE; ls"
    async with start_job(*sh(code + "; echo {key}"), environment={"X": "to {task}"}) as job:
        await job.dispatch()
        await job.results(2)
        said = job.file("g000000.01", "harness.log").read_text()
        task = job.neighbours.of(ExecutionOpened)[1].spec.task
    key = "key-g000000.01-1"
    first = f"http://127.0.0.1:9/v1 {key} g000000.01 {task} to {task}"
    assert said == f"http://127.0.0.1:9 {key}\n{first}\nthe prompt of tasks/{task}given\n{key}\n"


async def test_an_evaluation_runs_each_held_out_task_as_one_group(start_job: StartJob) -> None:
    async with start_job("true") as job:
        await job.dispatch(split="eval", groups=0)
        results = await job.results(2)
        opened = [message.spec for message in job.neighbours.of(ExecutionOpened)]
        finished = job.neighbours.of(ExecutionFinished)
    assert [result.execution for result in results] == ["e000000.00", "e000000.01"]
    assert {(s.task, s.split, s.group_executions) for s in opened} == {("c", "eval", 2)}
    assert {message.split for message in finished} == {"eval"}


ENDINGS = [
    ("exits at once with an error", "exit 7", "harness_error", 0.25, 7),
    ("exits at once without one", "exit 0", "completed", 0.25, 0),
    ("prints garbage", "head -c 300000 /dev/urandom; touch one; exit 0", "completed", 0.5, 0),
    ("hangs", "touch one two; sleep 100", "harness_timeout", 0.75, None),
    ("will not die", "touch one; trap '' TERM INT; sleep 100 & sleep 100", "harness_timeout", 0.5, None),
    ("deletes its workspace", "rm -r given; rmdir $PWD; exit 0", "completed", None, 0),
]


@pytest.mark.parametrize(
    ("code", "reason", "score", "exit_code"), [e[1:] for e in ENDINGS], ids=[e[0] for e in ENDINGS]
)
async def test_however_a_harness_ends_what_it_left_is_scored(
    start_job: StartJob, code: str, reason: str, score: float | None, exit_code: int | None
) -> None:
    timeout_s = 1.5 if "sleep" in code else 30.0
    async with start_job(*sh(code), timeout_s=timeout_s, group_size=1) as job:
        await job.dispatch()
        (result,) = await job.results(1)
    assert (result.reason, result.score, result.exit_code) == (reason, score, exit_code)


async def test_what_is_not_over_in_time_is_dropped(start_job: StartJob) -> None:
    async with start_job("sleep", "100", overall_timeout_s=1.0, group_size=1) as job:
        await job.dispatch()
        (result,) = await job.results(1)
        assert len(job.neighbours.of(CloseExecution)) == 1
    assert (result.reason, result.score) == ("overall_timeout", None)


async def test_a_slow_judge_does_not_outlast_the_time_there_is(start_job: StartJob, tmp_path: Path) -> None:
    """An abort waited for judges whose results nobody wanted (slime#2176)."""
    judged = tmp_path / "judged"
    evaluator = {"command": sh(f"touch {judged}; sleep 100")}
    # On a busy machine the time may be over before the judge is asked.
    for group, overall_timeout_s in enumerate((0.5, 4.0, 30.0)):
        limits = {"overall_timeout_s": overall_timeout_s, "group_size": 1, "first_group": group}
        async with start_job("true", evaluator=evaluator, **limits) as job:
            await job.dispatch()
            (result,) = await job.results(1)
        assert (result.reason, result.score) == ("overall_timeout", None)
        if judged.exists():
            break
    assert judged.exists()


async def test_a_harness_that_is_killed_is_started_again_on_a_fresh_workspace(start_job: StartJob) -> None:
    # The second attempt has another key, and sees nothing of the first.
    code = "touch a; case $OPENAI_API_KEY in *-1) touch b; kill -9 $$;; esac"
    with structlog.testing.capture_logs() as events:
        async with start_job(*sh(code), group_size=1) as job:
            await job.dispatch()
            (result,) = await job.results(1)
            opened = job.neighbours.of(ExecutionOpened)
            started = job.neighbours.of(ExecutionStarted)
    assert (result.reason, result.score) == ("completed", 0.5)
    assert [message.spec.attempt for message in opened] == [1, 2]
    assert len(started) == 1
    assert [(e["attempt"], e["signal"]) for e in events if e["event"] == "harness_killed"] == [(1, 9)]


async def test_kill_9_from_outside_is_seen_by_the_process_that_is_told_of(start_job: StartJob) -> None:
    killed: set[str] = set()

    def kill_first(event: Any) -> None:
        if event["event"] == "harness_started" and event["attempt"] == 1:
            os.kill(event["pid"], signal.SIGKILL)
            killed.add(event["execution"])

    with events_seen_by(kill_first):
        async with start_job(*sh("case $OPENAI_API_KEY in *-1) sleep 100;; esac; touch one")) as job:
            await job.dispatch()
            results = await job.results(2)
    assert killed == {"g000000.00", "g000000.01"}
    assert [(r.reason, r.score) for r in results] == [("completed", 0.5)] * 2


async def test_a_harness_that_is_always_killed_is_scored_in_the_end(start_job: StartJob) -> None:
    async with start_job(*sh("touch one; kill -9 $$"), attempts=2, group_size=1) as job:
        await job.dispatch()
        (result,) = await job.results(1)
        assert len(job.neighbours.of(ExecutionOpened)) == 2
    assert (result.reason, result.score) == ("harness_error", 0.5)
    assert "signal 9" in result.detail


async def test_a_harness_that_never_started_is_a_placeholder(start_job: StartJob) -> None:
    with structlog.testing.capture_logs() as events:
        async with start_job("./not-there", attempts=2, group_size=1) as job:
            await job.dispatch()
            (result,) = await job.results(1)
            assert len(job.neighbours.of(CloseExecution)) == 2
    assert (result.reason, result.score) == ("never_started", 0.0)
    told = [event for event in events if event["event"] == "harness_never_started"]
    assert [event["attempt"] for event in told] == [1, 2]
    assert "not-there" in told[0]["detail"]


async def test_a_workspace_that_cannot_be_made_is_a_placeholder(start_job: StartJob) -> None:
    async with start_job("true", attempts=1, group_size=1) as job:
        (job.run_dir / "executions" / "g000000.00").write_text("in the way")
        await job.dispatch(groups=2)
        first, second = await job.results(2)
    assert (first.reason, first.score) == ("never_started", 0.0)
    assert "workspace cannot be made" in first.detail
    assert (second.reason, second.score) == ("completed", 0.25)


async def test_a_failed_evaluation_is_not_a_zero(start_job: StartJob) -> None:
    with structlog.testing.capture_logs() as events:
        async with start_job("true", evaluator={"command": ("false",)}, group_size=1) as job:
            await job.dispatch()
            (result,) = await job.results(1)
            assert job.file("g000000.00", "workspace/given").exists()
    assert (result.reason, result.score) == ("completed", None)
    assert "printed nothing" in result.detail
    assert sum(event["event"] == "evaluation_failed" for event in events) == 3


ONCE = "if [ -e $1/seen ]; then echo 0.5; else touch $1/seen; fi"


async def test_what_was_dropped_is_played_anew(start_job: StartJob, tmp_path: Path) -> None:
    """Its group is whole, and what the first try left is not in the second."""
    command = ("sh", "-c", f"{ONCE}; test $(ls $2 | wc -l) = 2 || echo", "sh", str(tmp_path), "{workspace}")
    evaluator = {"command": command, "attempts": 1}
    with structlog.testing.capture_logs() as events:
        async with start_job(*sh("touch $$"), evaluator=evaluator, refills=1, concurrent=1) as job:
            await job.dispatch()
            results = await job.results(2)
            opened = [(m.spec.execution, m.spec.attempt) for m in job.neighbours.of(ExecutionOpened)]
            drawn_as = [(m.attempt, m.refill) for m in job.neighbours.of(OpenExecution)]
    assert [(result.reason, result.score) for result in results] == [("completed", 0.5)] * 2
    assert opened == [("g000000.00", 1), ("g000000.00", 2), ("g000000.01", 1)]
    assert drawn_as == [(1, 0), (2, 1), (1, 0)]
    assert [e["execution"] for e in events if e["event"] == "execution_refilled"] == ["g000000.00"]


async def test_refills_are_bounded(start_job: StartJob) -> None:
    evaluator = {"command": ("false",), "attempts": 1}
    async with start_job("true", evaluator=evaluator, refills=2, group_size=1) as job:
        await job.dispatch()
        (result,) = await job.results(1)
        opened = [m.spec.attempt for m in job.neighbours.of(ExecutionOpened)]
    assert (result.score, opened) == (None, [1, 2, 3])


ALONE = """
import os
own = os.environ["GYRE_GUARD"].removesuffix("evaluator/").encode()
def guard(pid):
    try:
        return open(f"/proc/{pid}/environ", "rb").read()
    except OSError:
        return b""
others = [pid for pid in os.listdir("/proc") if pid.isdecimal() and b"GYRE_GUARD=" + own in guard(pid)]
print(float(not [pid for pid in others if b"evaluator/" not in guard(pid)]))
"""


@pytest.mark.parametrize("sandbox", ["process", pytest.param("bubblewrap", marks=needs_bwrap)])
@pytest.mark.parametrize("ends", ["exit 0", "sleep 100"])
async def test_nothing_of_the_harness_runs_when_it_is_evaluated(
    start_job: StartJob, sandbox: str, ends: str
) -> None:
    """Whether it ended or its time did: nothing of it sees hidden tests, or changes what they are run on."""
    evaluator = {"command": ("{python}", "-I", "-S", "-c", ALONE)}
    command = sh(f"setsid sh -c 'while :; do sleep 0.01; done' & {ends}")
    async with start_job(*command, evaluator=evaluator, sandbox=sandbox, timeout_s=0.4, group_size=1) as job:
        await job.dispatch()
        (result,) = await job.results(1)
    assert result.score == 1.0


@needs_bwrap
async def test_hidden_tests_are_seen_by_no_harness(start_job: StartJob, tmp_path: Path) -> None:
    hidden = "from pathlib import Path\ndef test_it(): assert not Path('/workspace/found').read_text()\n"
    for name in ("tasks/a", "tasks/b", "held-out/c"):
        (tmp_path / name / "tests").mkdir()
        (tmp_path / name / "tests" / "test_hidden.py").write_text(hidden)
    places = f"{tmp_path} /task /tests /home /workspace/.."
    look = sh(f"find {places} -maxdepth 5 -name 'test_hidden*' > found 2>/dev/null")
    evaluator = {"pytest": PytestConfig(), "command": (), "sandbox": "bubblewrap"}
    async with start_job(*look, evaluator=evaluator, sandbox="bubblewrap", group_size=1) as job:
        await job.dispatch()
        (result,) = await job.results(1)
    assert (result.reason, result.score) == ("harness_error", 1.0)


async def test_workspaces_go_and_logs_stay(start_job: StartJob) -> None:
    async with start_job(*sh("echo said")) as job:
        await job.dispatch()
        await job.results(2)
        folder = job.run_dir / "executions" / "g000000.00"
        assert sorted(path.name for path in folder.iterdir()) == ["evaluator.log", "harness.log", "prompt.md"]


async def test_workspaces_are_kept_on_demand(start_job: StartJob) -> None:
    async with start_job(*sh("touch one"), keep=True) as job:
        await job.dispatch()
        await job.results(2)
        assert job.file("g000000.00", "workspace/one").exists()


async def test_no_more_run_at_once_than_may(start_job: StartJob, tmp_path: Path) -> None:
    count = (
        f"echo x >> {tmp_path}/running; wc -l < {tmp_path}/running; sleep 0.05; sed -i 1d {tmp_path}/running"
    )
    async with start_job(*sh(count), concurrent=1, group_size=3) as job:
        await job.dispatch(groups=2)
        results = await job.results(6)
        logs = [job.file(result.execution, "harness.log").read_text() for result in results]
    assert logs == ["1\n"] * 6


async def test_a_resumed_job_runs_only_what_is_missing(start_job: StartJob) -> None:
    begun = IncompleteGroup(group="g000003", task="b", ended=("g000003.01",))
    resume = ResumeState(finished=("g000002",), incomplete=(begun,), next_group=4, next_eval=0)
    async with start_job("true", resume=resume, first_group=2) as job:
        await job.dispatch(groups=3)
        results = await job.results(3)
        dispatched = job.neighbours.of(ExecutionsDispatched)
    assert [r.execution for r in results] == ["g000003.00", "g000004.00", "g000004.01"]
    assert [(message.executions, message.groups) for message in dispatched] == [(3, 3)]


async def test_a_fault_in_one_execution_harms_no_other(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gyre.harness.execution import ExecutionActor

    mark = ExecutionActor._mark

    def faulty(self: ExecutionActor) -> str:
        if self._spec.index == 0:
            raise RuntimeError("a fault of ours")
        return mark(self)

    monkeypatch.setattr(ExecutionActor, "_mark", faulty)
    with structlog.testing.capture_logs() as events:
        async with start_job("true") as job:
            await job.dispatch()
            first, second = await job.results(2)
    assert (first.score, second.score) == (None, 0.25)
    assert "a fault of ours" in first.detail
    assert [event["execution"] for event in events if event["event"] == "execution_crashed"] == ["g000000.00"]


async def test_when_the_job_stops_nothing_is_left(start_job: StartJob) -> None:
    started = asyncio.Event()
    running: list[int] = []

    def see(event: Any) -> None:
        if event["event"] == "harness_started":
            running.append(event["pid"])
            if len(running) == 4:
                started.set()

    with events_seen_by(see):
        async with start_job(*sh("setsid sleep 100 & sleep 100")) as job:
            await job.dispatch(groups=2)
            async with asyncio.timeout(30):
                await started.wait()
            guards = [guard_of(pid) for pid in running]
    assert not any(marked(guard) for guard in guards)
    assert not job.neighbours.of(ExecutionEnded)


def guard_of(pid: int) -> str:
    while not (environment := Path(f"/proc/{pid}/environ").read_bytes()):
        time.sleep(0.001)  # in the midst of an exec
    for entry in environment.decode().split("\0"):
        name, _, value = entry.partition("=")
        if name == guardian.MARK:
            return value.split("/")[0] + "/"
    raise AssertionError("a harness without a mark")


FAULTS = [
    ({"command": ("no-such-harness",)}, r"harness\.command: cannot start 'no-such-harness'"),
    ({"evaluator": {"command": ("no-such-judge",)}}, r"evaluator\.command: cannot start 'no-such-judge'"),
    (
        {"evaluator": {"mix": {"a": PartConfig(command=("no-such-judge",))}, "command": ()}},
        r"evaluator\.mix\.a\.command: cannot start 'no-such-judge'",
    ),
    (
        {"evaluator": {"pytest": PytestConfig(), "command": ()}},
        r"tasks/a/tests: there is no such folder of hidden tests; .*evaluator\.pytest\.tests",
    ),
]


@pytest.mark.parametrize(("change", "words"), FAULTS)
async def test_a_program_that_is_not_there_fails_the_start(
    start_job: StartJob, change: Any, words: str
) -> None:
    settings = dict(change)
    with pytest.raises((SpawnFailed, NodeFailed), match=words):
        async with start_job(*settings.pop("command", ("true",)), **settings):
            pass


async def test_tasks_that_are_not_there_fail_the_start(start_job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "tasks" / "a" / "prompt.md").unlink()
    with pytest.raises((SpawnFailed, NodeFailed), match=r"tasks/a: has no prompt\.md"):
        async with start_job("true"):
            pass
