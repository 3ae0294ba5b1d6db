"""kill -9 of satellites, of their ranks and of a harness in one job: it goes on and loses nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from contextlib import suppress
from datetime import datetime
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest

from gyre.trajectory.reader import JournalReader
from gyre.trajectory.records import CallRecord
from tests.run.conftest import Waited
from tests.run.jobs import (
    ROOT,
    RunningJob,
    assert_each_execution_ended_once,
    assert_each_micro_step_counts_once,
    kill,
    running,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

STEPS = 3
EVALS = 16
HARNESS = str(ROOT / "examples" / "quickstart" / "harness.py")
# The group of g000012.03 is g000012. Executions of the evaluation e000002 play twice, with a pause.
BEHIND_GATES = """
group="${GYRE_EXECUTION%.*}"
flock --shared "$0/$group" true
if [ "$group" = e000002 ]; then
    "$@"
    flock --shared "$0/pause" true
fi
exec "$@"
"""


class Gates:
    """A lock for each group of executions, which its harnesses take before they begin, and one for the pause:
    until it is opened, they wait."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        groups = [f"g{number:06d}" for number in range(2 * STEPS)]
        groups += [f"e{number:06d}" for number in range(STEPS + 1)]
        self._files = {name: (folder / name).open("w") for name in [*groups, "pause"]}
        for file in self._files.values():
            fcntl.flock(file, fcntl.LOCK_EX)

    def open(self, *names: str) -> None:
        for name in names:
            fcntl.flock(self._files[name], fcntl.LOCK_UN)


@pytest.fixture(scope="module")
def job(waited: Waited, tmp_path_factory: pytest.TempPathFactory) -> RunningJob:
    return play(tmp_path_factory.mktemp("faults"), waited.policy)


def overrides(gates: Path, policy: Path) -> list[str]:
    harness = ["sh", "-c", BEHIND_GATES, str(gates), "{python}", "-I", "-S", HARNESS]
    return [
        f"harness.command={json.dumps(harness)}",
        "harness.timeout_s=300",
        "harness.overall_timeout_s=600",
        "model.recipe=",
        "model.warm_start=",
        f"model.path={policy}",
        f"train.steps={STEPS}",
        "train.groups_per_step=2",
        "train.group_size=16",
        # So high that satellites may train while evaluations run.
        "cells.capacity_executions=30",
        # Two trajectories a micro-step, so that there is work for all cells.
        "model.context_tokens=256",
        "train.micro_step_tokens=256",
        f"eval.count={EVALS}",
        "eval.every_steps=1",
        "checkpoint.keep=100",
    ]


def play(folder: Path, policy: Path) -> RunningJob:
    """The job when it is over; it began with the policy of another one.

    Step 0: a harness is killed, and in rollout role satellite 1 and the rank of satellite 2; the core goes
    on alone. Step 1, which waits until both are back, in train role: the rank of satellite 1, which holds a
    lease, and satellite 2.
    Step 2 has all cells again, and an evaluation that lasts until it is committed.
    """
    gates = Gates(folder / "gates")
    with running(folder / "job", *overrides(folder / "gates", policy)) as job:
        job.wait_for_count(3, "route_opened", timeout_s=120.0)
        job.wait_for_count(EVALS + 32, "harness_started")
        gates.open("e000000")
        job.wait_for("execution_finished")
        # Frozen first, so that calls are in flight there when they die.
        for cell in (1, 2):
            os.kill(job.rank_pid(cell), signal.SIGSTOP)
        gates.open("g000001")
        kill_harness(job, "g000001")
        kill(job.pid("cell-1"))
        kill(job.rank_pid(2))
        gates.open("g000000")  # not before: the core would leave rollout role for what is to be trained

        job.wait_for_count(2, "cell_up", cell=1)
        job.wait_for_count(2, "cell_up", cell=2)
        gates.open("e000001")
        job.wait_for("eval", step=1)  # past all changes of step 0
        gates.open("g000002", "g000003")
        # The core is frozen, so that work is left, then satellite 1 with its claim. Not before all
        # have ended, for which engines are asked what they sampled.
        job.wait_for("role_change", cell=0, role="train")
        job.wait_for_count(64, "execution_finished", split="train")
        core = job.rank_pid(0)
        os.kill(core, signal.SIGSTOP)
        job.wait_for("role_change", cell=1, role="train")
        os.kill(job.rank_pid(1), signal.SIGSTOP)
        job.wait_for("role_change", cell=2, role="train")
        os.kill(core, signal.SIGCONT)
        wait_for_contribution(job, step=1)
        kill(job.rank_pid(1))
        kill(job.pid("cell-2"))

        job.wait_for_count(3, "cell_up", cell=1)
        job.wait_for_count(3, "cell_up", cell=2)
        kill(job.pid("store"))
        job.wait_for_count(1, "actor_restarted", actor="store#2")
        # The core is frozen until satellite 1 trains too, so that work is left for it.
        gates.open("g000004", "g000005", "e000002", "e000003")
        job.wait_for("role_change", cell=0, role="train")
        job.wait_for_count(96, "execution_finished", split="train")
        core = job.rank_pid(0)
        os.kill(core, signal.SIGSTOP)
        job.wait_for("role_change", cell=1, role="train")
        os.kill(core, signal.SIGCONT)
        job.wait_for("step", step=2)
        gates.open("pause")
        assert job.exit(120.0) == 0
        job.assert_nothing_left()
    return job


def kill_harness(job: RunningJob, group: str) -> None:
    """Kills one of the group that has made a call and is not over. A cell that is frozen holds up its end."""
    started = [e for e in job.named("harness_started") if e["execution"].startswith(group)]
    while True:
        for event in started:
            if calls(job, event["execution"]) and stopped(event["pid"]):
                return kill(event["pid"])
        time.sleep(0.01)  # a call is no event


def stopped(pid: int) -> bool:
    """Whether it had not ended yet; now it cannot."""
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, signal.SIGSTOP)
        while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) not in "TZX":
            time.sleep(0.001)
        return state == "T"
    return False


def wait_for_contribution(job: RunningJob, step: int) -> None:
    """The first: nothing is left to be claimed then."""
    while True:
        with JournalReader(job.run_dir / "journal.db") as journal:
            if journal.contributions(step):
                return
        time.sleep(0.01)  # a contribution is no event


def calls(job: RunningJob, execution: str, *, earlier_attempts: bool = False) -> list[CallRecord]:
    with JournalReader(job.run_dir / "journal.db") as journal:
        return journal.calls(execution, earlier_attempts=earlier_attempts)


def calls_were_at(job: RunningJob, cell: int) -> bool:
    """When its first life ended; also if it was about to train, and waited for them to leave."""
    since = dropwhile(lambda e: (e["event"], e.get("cell")) != ("cell_down", cell), job.events)
    its_end = takewhile(lambda e: (e["event"], e.get("cell")) != ("cell_up", cell), since)
    return any(e["event"] == "route_closed" and e["cell"] == cell and e["calls_moved"] for e in its_end)


def test_satellites_come_back_each_time(job: RunningJob) -> None:
    downs = [(event["cell"], event["incarnation"]) for event in job.named("cell_down")]
    assert sorted(downs) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    ups = [(event["cell"], event["incarnation"]) for event in job.named("cell_up")]
    assert sorted(ups) == [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]


def test_satellites_that_came_back_take_part(job: RunningJob) -> None:
    with JournalReader(job.run_dir / "journal.db") as journal:
        contributors = {(m.cell, m.incarnation) for m in journal.contributions(STEPS - 1)}
    assert (1, 3) in contributors


def test_no_call_fails_and_calls_in_flight_go_on_elsewhere(job: RunningJob) -> None:
    assert job.summary()["failed_calls"] == 0
    assert job.named("call_failed") == []
    died_under = {event["cell"] for event in job.named("engine_failed")}
    died_under |= {cell for cell in (1, 2) if calls_were_at(job, cell)}
    assert died_under == {1, 2}
    with JournalReader(job.run_dir / "journal.db") as journal:
        reroutes = [
            call.reroutes for row in journal.executions() for call in journal.calls(row.spec.execution)
        ]
    assert max(reroutes) > 0


def test_no_execution_is_lost(job: RunningJob) -> None:
    assert_each_execution_ended_once(job)
    assert all(event["score"] is not None for event in job.named("execution_finished"))


def test_each_micro_step_counts_once_whatever_died(job: RunningJob) -> None:
    assert_each_micro_step_counts_once(job.run_dir, STEPS)


def test_what_a_dead_satellite_had_claimed_is_given_to_others(job: RunningJob) -> None:
    assert 1 in {event["cell"] for event in job.named("leases_returned")}


def test_a_killed_harness_is_dispatched_again(job: RunningJob) -> None:
    (killed,) = job.named("harness_killed")
    execution = killed["execution"]
    assert [e["attempt"] for e in job.named("harness_started", execution=execution)] == [1, 2]
    (finished,) = job.named("execution_finished", execution=execution)
    assert (finished["attempt"], finished["reason"]) == (2, "completed")
    last, all_of_them = calls(job, execution), calls(job, execution, earlier_attempts=True)
    assert 0 < len(last) < len(all_of_them)


def test_evaluations_stay_at_one_version_while_cells_change_role_and_train(job: RunningJob) -> None:
    changes = [datetime.fromisoformat(event["time"]).timestamp() for event in job.named("role_change")]
    with JournalReader(job.run_dir / "journal.db") as journal:
        evaluations = [row.spec for row in journal.executions() if row.spec.split == "eval"]
    assert len(evaluations) == EVALS * (STEPS + 1)
    for spec in evaluations:
        made = calls(job, spec.execution)
        assert {v for call in made for v in call.versions} == {spec.version_dispatched}
        if spec.group == "e000002":
            assert any(made[0].started_s < change < made[-1].finished_s for change in changes)


def test_it_began_with_the_checkpoint_that_it_was_given(job: RunningJob) -> None:
    """Without a warm start the recipe's model scores 0."""
    assert job.named("eval")[0]["score"] > 0.15
    assert "warm_start" not in (job.run_dir / "logs" / "cell-0.log").read_text()


def test_a_checkpoint_is_a_hugging_face_model(job: RunningJob) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = job.summary()["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "next: k7.csv"}], return_tensors="pt")
    ids = prompt["input_ids"]
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]
