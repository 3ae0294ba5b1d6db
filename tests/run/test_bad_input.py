"""Bad input, from end to end: a clear error or event each, and the rest of the job unharmed."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from gyre.trajectory.reader import JournalReader
from tests.run.bad_jobs import Ended, copied_policy, start, start_here, write_job
from tests.run.jobs import RunningJob, assert_each_execution_ended_once

HARNESSES = (
    "works",
    "exits_at_once",
    "hangs",
    "kills_itself",
    "prints_garbage",
    "hangs_up",
    "sends_nonsense",
    "prompts_too_long",
)
EVALUATORS = (
    "evaluator_fails",
    "evaluator_says_nothing",
    "evaluator_says_nan",
    "evaluator_hangs",
    "evaluator_loses_one",
    "evaluator_recovers",
)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

Start = Callable[..., Ended]


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Start:
    """Starts a job in this process."""
    return partial(start_here, capsys)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job in which nothing is wrong."""
    return write_job(tmp_path, "works")


# --- a start that fails: one clear line, exit code 1 or 2, no process left ---------------------------


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    ended = start(tmp_path / "no.toml", tmp_path / "run")
    assert (ended.code, ended.output) == (2, "")
    assert "no.toml: 1 fault\n  file: No such file or directory; allowed: a readable job file" in ended.errors


def test_a_job_file_that_is_cut(here: Start, job: Path, tmp_path: Path) -> None:
    job.write_text(job.read_text()[:10])
    ended = here(job, tmp_path / "run")
    assert ended.code == 2
    assert "allowed: TOML" in ended.errors


def test_all_faults_of_a_job_file_at_once(here: Start, job: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    bad = ("cells.cels=3", "train.steps=0", "tasks.path=nowhere", f"model.path={tmp_path / 'empty'}")
    ended = here(job, tmp_path / "run", *bad)
    assert ended.code == 2
    assert "job.toml: 4 faults\n" in ended.errors
    for words in (
        "cells.cels: unknown key",
        "did you mean cells.cells?",
        "train.steps: found 0",
        "tasks.path: no folder",
        "model.path: no config.json in",
    ):
        assert words in ended.errors
    assert not (tmp_path / "run").exists()


def no_prompt(job: Path) -> str:
    (job.parent / "tasks" / "broken").mkdir()
    return "tasks/broken: has no prompt.md; allowed: write the task's text there"


def empty_prompt(job: Path) -> str:
    (job.parent / "tasks" / "works" / "prompt.md").write_text(" \n")
    return "tasks/works/prompt.md: is empty; allowed: write the task's text there"


def binary_prompt(job: Path) -> str:
    (job.parent / "tasks" / "works" / "prompt.md").write_bytes(b"\xff\xfe\x00")
    return "tasks/works/prompt.md: cannot be read"


@pytest.mark.parametrize("damage", [no_prompt, empty_prompt, binary_prompt])
def test_a_corrupt_task(here: Start, job: Path, tmp_path: Path, damage: object) -> None:
    words = damage(job)  # type: ignore[operator]
    ended = here(job, tmp_path / "run")
    assert ended.code == 2
    assert words in ended.errors


def test_recipes_that_fail(here: Start, job: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "import sys\n"
        "def model(folder):\n    raise OSError('no such\\nweights')\n"
        "def tasks(folder, count, seed):\n    sys.exit('no tasks')\n"
    )
    ended = here(job, tmp_path / "run", "model.path=", f"model.recipe={recipe}:model")
    assert ended.code == 1
    assert "recipe.py:model: raised OSError: no such weights; it is called with (folder)" in ended.why
    ended = here(job, tmp_path / "run", "tasks.path=", f"tasks.recipe={recipe}:tasks")
    assert ended.code == 1
    assert (
        "recipe.py:tasks: raised SystemExit: no tasks; it is called with (folder, count, seed)" in ended.why
    )


def test_demonstrations_that_fail(job: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def demos():\n    yield from ()\n")
    ended = start(job, tmp_path / "run", f"model.warm_start.demos={recipe}:demos")
    assert ended.code == 1
    assert "recipe.py:demos: ended after 0 conversations; it is called without arguments" in ended.why
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (failed,) = [event for event in events if event["event"] == "job_failed"]
    assert "in warm_start" in failed["trace"][-1]


def no_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return "has no model.safetensors; save the model there again"


def cut_weights(model: Path) -> str:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    return "model.safetensors is damaged: it should have"


def cut_config(model: Path) -> str:
    (model / "config.json").write_text('{"model_type": ')
    return "config.json is no JSON"


def no_tokenizer(model: Path) -> str:
    (model / "tokenizer.json").unlink()
    return "no tokenizer.json"


def no_chat_template(model: Path) -> str:
    (model / "chat_template.jinja").unlink()
    return "no chat template: add chat_template.jinja"


@pytest.mark.parametrize("damage", [no_weights, cut_weights, cut_config, no_tokenizer, no_chat_template])
def test_a_model_folder_that_is_not_whole(here: Start, job: Path, tmp_path: Path, damage: object) -> None:
    model = copied_policy(tmp_path / "model")
    words = damage(model)  # type: ignore[operator]
    ended = here(job, tmp_path / "run", f"model.path={model}")
    assert ended.code == 1
    assert str(model) in ended.why
    assert words in ended.why


def test_a_command_that_is_not_found(here: Start, job: Path, tmp_path: Path) -> None:
    for table in ("harness", "evaluator"):
        ended = here(job, tmp_path / "run", f'{table}.command=["no-such-program"]')
        assert ended.code == 1
        assert f"{table}.command: cannot start 'no-such-program': it is in none of" in ended.why


@pytest.mark.parametrize("key", ["harness.proxy.port", "watch.prometheus_port"])
def test_a_port_in_use(job: Path, tmp_path: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = start(job, tmp_path / "run", f"{key}={taken.getsockname()[1]}")
    assert ended.code == 1
    assert key in ended.why
    assert "the port is in use" in ended.why


def test_a_run_folder_that_cannot_be_one(here: Start, job: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for run_dir, fault in ((tmp_path / "file", "run_dir:"), (tmp_path / "file" / "run", "cannot be written")):
        ended = here(job, run_dir)
        assert ended.code == 2
        assert fault in ended.errors


def test_nothing_to_resume(here: Start, job: Path, tmp_path: Path) -> None:
    ended = here(job, tmp_path / "run", resume=True)
    assert (ended.code, ended.why) == (
        2,
        f"{tmp_path / 'run'}: there is no run to resume: leave --resume away to start one",
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.db").touch()
    ended = here(job, tmp_path / "run", resume=True)
    assert ended.code == 2
    assert "journal.db is empty" in ended.why


# --- a job among misbehaving harnesses and evaluators ------------------------------------------------


class MixedJob(RunningJob):
    """One step of one group a misbehaviour. `refused` are jobs that were started in its run folder."""

    code: int
    refused: list[Ended]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedJob]:
    """When it has ended."""
    folder = tmp_path_factory.mktemp("mixed")
    job = MixedJob(folder / "run", (), job=write_job(folder, *HARNESSES, *EVALUATORS))
    try:
        job.wait_for("proxy_listening")
        # Both at once, and early: on a busy machine the job does not outlast one after the other.
        with ThreadPoolExecutor(2) as starts:
            again = [
                starts.submit(start, folder / "job.toml", folder / "run", resume=resume)
                for resume in (False, True)
            ]
        job.refused = [refused.result() for refused in again]
        job.code = job.exit()
        yield job
    finally:
        job.clean()


def outcomes(job: RunningJob, task: str) -> list[tuple[str, float | None]]:
    """Reason and score of the executions of a task, by their number."""
    ended = sorted(job.named("execution_finished", task=task), key=lambda event: event["execution"])
    return [(event["reason"], event["score"]) for event in ended]


def group_of(job: RunningJob, task: str) -> str:
    return str(job.named("execution_finished", task=task)[0]["group"])


def test_the_job_goes_on(mixed: MixedJob) -> None:
    assert mixed.code == 0
    assert mixed.summary()["steps"] == 1
    assert mixed.summary()["failed_calls"] == 0
    assert Path(mixed.summary()["checkpoint"]).name == "step-000001"
    mixed.assert_nothing_left()


def test_of_complete_groups_every_token_is_trained_or_listed(mixed: MixedJob) -> None:
    with JournalReader(mixed.run_dir / "journal.db") as journal:
        made = [
            call
            for group in journal.groups()
            for row in journal.executions(group.group)
            for call in journal.calls(row.execution, earlier_attempts=True)
        ]
    summary = mixed.summary()
    listed = sum(summary["excluded_tokens"].values())
    assert summary["trained_tokens"] > 0
    assert summary["trained_tokens"] + listed == sum(len(call.output_ids) for call in made)


WORKS = [("completed", 0.5), ("completed", 0.75), ("completed", 0.5)]
OUTCOMES = {
    "works": WORKS,
    "exits_at_once": [("harness_error", 0.0)] * 3,
    "hangs": [("harness_timeout", 0.25)] * 3,
    "kills_itself": [("harness_error", 0.25)] * 3,
    "prints_garbage": WORKS,
    "hangs_up": WORKS,
    "sends_nonsense": WORKS,
    "prompts_too_long": WORKS,
    "evaluator_fails": [("completed", None)] * 3,
    "evaluator_says_nothing": [("completed", None)] * 3,
    "evaluator_says_nan": [("completed", None)] * 3,
    "evaluator_hangs": [("completed", None)] * 3,
    "evaluator_loses_one": [("completed", 0.5), ("completed", None), ("completed", 0.5)],
    "evaluator_recovers": WORKS,
}


@pytest.mark.parametrize("task", OUTCOMES)
def test_each_execution_ends_as_it_should(mixed: MixedJob, task: str) -> None:
    assert outcomes(mixed, task) == OUTCOMES[task]


def test_what_printed_garbage_has_a_log_of_bounded_length(mixed: MixedJob) -> None:
    log = mixed.run_dir / "executions" / f"{group_of(mixed, 'prints_garbage')}.00" / "harness.log"
    assert 50_000 < log.stat().st_size < 100_000


def test_a_killed_harness_is_dispatched_again(mixed: MixedJob) -> None:
    killed = mixed.named("harness_killed")
    group = group_of(mixed, "kills_itself")
    assert sorted((e["execution"], e["attempt"]) for e in killed) == [
        (f"{group}.{index:02d}", attempt) for index in range(3) for attempt in (1, 2)
    ]


def test_a_failed_evaluation_is_told_and_dropped_and_never_a_zero(mixed: MixedJob) -> None:
    reasons = {
        "evaluator_fails": "it said 'RuntimeError: the grader is broken'",
        "evaluator_says_nothing": "it printed nothing",
        "evaluator_says_nan": "its last line is no number: 'nan'",
        "evaluator_hangs": "it did not end within 6 s",
    }
    for task, reason in reasons.items():
        (discarded,) = mixed.named("group_discarded", group=group_of(mixed, task))
        assert (discarded["scored"], discarded["dropped"]) == (0, 3)
        for event in mixed.named("execution_finished", task=task):
            assert event["detail"].startswith("evaluation failed 2 times: ")
            assert reason in event["detail"]
            tries = mixed.named("evaluation_failed", execution=event["execution"])
            assert [told["attempt"] for told in tries] == [1, 2]
    recovered = group_of(mixed, "evaluator_recovers")
    tries = [e for e in mixed.named("evaluation_failed") if e["execution"].startswith(recovered)]
    assert [told["attempt"] for told in tries] == [1, 1, 1]


def test_a_group_that_lost_a_member_counts_without_it(mixed: MixedJob) -> None:
    (group,) = mixed.named("group", group=group_of(mixed, "evaluator_loses_one"))
    assert (len(group["scores"]), group["dropped"]) == (2, 1)
    (step,) = mixed.named("step")
    scored = sum(score is not None for task in OUTCOMES for _, score in OUTCOMES[task])
    assert step["executions"] == scored
    assert step["grad_norm"] > 0


def test_a_second_job_in_the_same_run_folder_is_refused(mixed: MixedJob) -> None:
    for ended in mixed.refused:
        assert (ended.code, ended.output) == (2, "")
        assert ended.errors == f"{mixed.run_dir}: another job runs there: set name or run_dir to another\n"
    assert len(mixed.named("burst")) == 1


# --- going on with a run that was damaged ------------------------------------------------------------


@pytest.fixture
def damaged(mixed: MixedJob, tmp_path: Path) -> Path:
    """A copy of the run, with a second checkpoint that is cut. Its tasks are well-behaved."""
    run_dir = Path(shutil.copytree(mixed.run_dir, tmp_path / "run"))
    first, second = (run_dir / "checkpoints" / f"step-00000{step}" for step in (1, 2))
    shutil.copytree(first, second)
    (second / "gyre.json").write_text((second / "gyre.json").read_text().replace('"step": 1,', '"step": 2,'))
    cut_weights(second)
    return run_dir


def resumed(run_dir: Path, *overrides: str) -> RunningJob:
    """With tasks that all are well-behaved."""
    job = write_job(run_dir.parent / "resumed", "works")
    sets = (f"train.groups_per_step={len(HARNESSES + EVALUATORS)}", *overrides)
    return RunningJob(run_dir, sets, job=job, resume=True)


def test_a_cut_checkpoint_is_skipped_and_the_one_before_is_used(damaged: Path) -> None:
    job = resumed(damaged, "train.steps=2", "train.group_size=2")
    try:
        assert job.exit() == 0
        (skipped,) = job.named("checkpoint_skipped")
        assert skipped["folder"].endswith("step-000002")
        assert "model.safetensors is not as it was written" in skipped["reason"]
        (going_on,) = job.named("resume")
        assert going_on["step"] == 1
        assert going_on["checkpoint"].endswith("step-000001")
        assert [event["step"] for event in job.named("step")] == [1]
        assert {event["score"] for event in job.named("execution_finished")} == {0.5, 0.75}
        assert job.summary()["checkpoint"].endswith("step-000002")
        assert sorted(path.name for path in (damaged / "checkpoints").iterdir()) == [
            "step-000001",
            "step-000002",
        ]
        job.assert_nothing_left()
    finally:
        job.clean()


def test_without_a_whole_checkpoint_the_job_says_so_and_begins_at_step_0(damaged: Path) -> None:
    (damaged / "checkpoints" / "step-000001" / "gyre.json").unlink()
    job = resumed(damaged)
    try:
        assert "checkpoints has no whole checkpoint" in job.wait_for("resume_at_the_start")["reason"]
        assert job.wait_for("resume")["step"] == 0
        assert len(job.named("checkpoint_skipped")) == 2
    finally:
        job.clean()


def test_a_corrupt_journal_is_named_with_what_to_do(here: Start, job: Path, damaged: Path) -> None:
    journal = damaged / "journal.db"
    content = bytearray(journal.read_bytes())
    content[4096:12288] = bytes(range(256)) * 32
    journal.write_bytes(content)
    ended = here(job, damaged, resume=True)
    assert ended.code == 1
    assert f"{journal}: the journal is corrupt" in ended.why
    assert "restore the file from a copy, or start a new run under another name" in ended.why
    assert journal.read_bytes() == content


# --- a full disk --------------------------------------------------------------------------------------

DISK_BYTES = 3 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A run folder with little room: not enough for a checkpoint."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes all room that is left."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def test_a_full_disk_makes_the_job_wait_and_costs_it_nothing_but_checkpoints(job: Path, disk: Path) -> None:
    running = RunningJob(disk, ("train.steps=2",), job=job)
    try:
        running.wait_for("harness_started")
        ballast = fill(disk)
        running.wait_for_line("journal_full")
        ballast.unlink()
        running.wait_for_line("journal_recovered")
        assert running.exit() == 1
        assert running.named("last_checkpoint_not_written")[0]["steps_lost"] == 2
        assert [event["step"] for event in running.named("step")][-1] == 1
        summary = running.summary()
        assert (summary["steps"], summary["failed_calls"], summary["checkpoint"]) == (2, 0, None)
        assert sum("events are lost" in line for line in running.lines) <= 1
        failed = running.named("checkpoint_failed")
        assert {event["step"] for event in failed} == {1, 2}
        assert all("No space left" in event["reason"] for event in failed)
        assert list((disk / "checkpoints").iterdir()) == []
        assert_each_execution_ended_once(running)
        running.assert_nothing_left()
    finally:
        running.clean()


def test_a_job_that_finds_no_room_does_not_begin(here: Start, job: Path, disk: Path) -> None:
    fill(disk)
    ended = here(job, disk / "run")
    assert ended.code == 2
    assert "cannot be written (No space left on device): make room or set run_dir to another" in ended.errors
