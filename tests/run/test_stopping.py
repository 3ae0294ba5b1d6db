"""A job that idles costs nothing and stops at once; killed or interrupted it goes on where it was."""

from __future__ import annotations

import os
import signal

import pytest

from gyre.trajectory.reader import JournalReader
from tests.run.conftest import IDLE_S, IDLE_SHARE, Waited
from tests.run.jobs import (
    SMALL,
    assert_each_micro_step_counts_once,
    kill,
    processes,
    rise,
    running,
    wait_gone,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

STEPS = 3


def test_an_idle_job_costs_nothing(waited: Waited) -> None:
    # The root, the proxy, the fork server, the store, two cells of one rank, the guardian of the harnesses.
    assert len(waited.idle_cpu_s) == 9
    assert sum(waited.idle_cpu_s.values()) < IDLE_SHARE * IDLE_S


def test_the_first_interrupt_drains_to_a_checkpoint_at_once(waited: Waited) -> None:
    assert waited.exit_code == 130
    assert waited.summary["checkpoint"] == str(waited.run_dir / "checkpoints" / "step-000000")
    assert waited.stop_s < 30.0  # the harnesses would sleep for minutes


def test_a_job_goes_on_after_whatever_ended_it(waited: Waited) -> None:
    """Its lives: interrupted in step 0 (above), root killed in step 1, aborted while it hangs, then whole.
    With a learning rate of 0 no weight may change on the way, and no reward rise."""
    run_dir = waited.run_dir
    job_keys = (*SMALL, f"train.steps={STEPS}", "train.lr=0", "eval.every_steps=100", "cells.cells=2")

    with running(run_dir, *job_keys, resume=True) as job:
        assert job.wait_for("resume")["step"] == 0
        job.wait_for("checkpoint", step=1, timeout_s=120.0)
        job.wait_for_count(16 + 5, "execution_finished", split="train")
        all_of_it = processes(run_dir)
        kill(job.process.pid)
        assert wait_gone(all_of_it, 30.0) == []
        assert processes(run_dir) == []
        acknowledged = {e["execution"]: e["score"] for e in job.named("execution_finished")}
    with JournalReader(run_dir / "journal.db") as journal:
        assert [step.step for step in journal.steps()] == [0]
        ended = {row.spec.execution for row in journal.executions() if row.ended is not None}
    assert ended >= acknowledged.keys()

    with running(run_dir, *job_keys, resume=True) as job:
        assert job.wait_for("resume")["step"] == 1
        job.wait_for("cell_up", cell=0)
        os.kill(job.rank_pid(0), signal.SIGSTOP)
        job.interrupt()
        job.wait_for("drain")
        job.interrupt()
        assert job.exit(30.0) == 130
        job.assert_nothing_left()

    with running(run_dir, *job_keys, resume=True) as job:
        assert job.exit(120.0) == 0
        assert [event["step"] for event in job.named("step")] == [1, 2]
        assert job.summary()["steps"] == STEPS
        assert {e["execution"] for e in job.named("harness_started")}.isdisjoint(ended)
        job.assert_nothing_left()

    assert_each_micro_step_counts_once(run_dir, STEPS)
    with JournalReader(run_dir / "journal.db") as journal:
        scores = {name: s for group in journal.groups() for name, s in group.scores.items()}
        assert all(step.grad_norm > 0 for step in journal.steps())
    assert acknowledged.items() <= scores.items()
    checkpoints = run_dir / "checkpoints"
    assert weights(checkpoints / f"step-{STEPS:06d}") == weights(checkpoints / "step-000000")
    # The policy is the same, so this is noise alone: beyond it once in 30000 runs.
    gain, error = rise(run_dir)
    assert gain < 4 * error
