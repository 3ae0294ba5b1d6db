"""examples/custom_harness.toml, shortened, as a user starts it; its harness' process is killed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.jobs import (
    ROOT,
    RunningJob,
    assert_each_execution_ended_once,
    assert_each_micro_step_counts_once,
    kill,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SHORT = (
    "model.warm_start.steps=2",
    "cells.cells=2",
    "train.steps=1",
    "train.groups_per_step=2",
    "train.group_size=4",
    "eval.every_steps=0",
    "harness.options.max_turns=4",
)


def test_a_kill_of_the_harness_process_loses_no_execution(tmp_path: Path) -> None:
    job = RunningJob(tmp_path / "run", SHORT, job=ROOT / "examples" / "custom_harness.toml")
    try:
        job.wait_for("harness_started", timeout_s=60.0)
        kill(job.pid("host"))
        assert job.exit(60.0) == 0
        job.assert_nothing_left()
        assert job.named("harness_killed")
        assert job.pid("host") in {event["pid"] for event in job.named("process_ended")}
        assert_each_execution_ended_once(job)
        assert_each_micro_step_counts_once(job.run_dir, 1)
        assert {event["reason"] for event in job.named("execution_finished")} <= {
            "completed",
            "harness_error",
        }
        assert job.summary()["failed_calls"] == 0
    finally:
        job.clean()
