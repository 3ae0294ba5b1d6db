"""A job whose cells are two ranks each, that are one engine in rollout role; one that follows is killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest

from gyre.trajectory.reader import JournalReader
from tests.run.conftest import Waited
from tests.run.jobs import (
    ROOT,
    assert_each_execution_ended_once,
    assert_each_micro_step_counts_once,
    kill,
    running,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif("GYRE_TEST_TP" not in os.environ, reason="takes long: GYRE_TEST_TP=1"),
]

STEPS = 2
# Of step 0, one group waits until the cell is back.
BEHIND_A_GATE = """
case "$GYRE_EXECUTION" in g000001.*) flock --shared "$0" true;; esac
exec "$@"
"""


def test_cells_that_are_one_engine_change_role_and_lose_a_rank(waited: Waited, tmp_path: Path) -> None:
    harness = str(ROOT / "examples" / "quickstart" / "harness.py")
    gate = (tmp_path / "gate").open("w")
    fcntl.flock(gate, fcntl.LOCK_EX)
    command = ["sh", "-c", BEHIND_A_GATE, gate.name, "{python}", "-I", "-S", harness]
    overrides = (
        "train.groups_per_step=2",
        "train.group_size=6",
        "eval.count=12",
        f"harness.command={json.dumps(command)}",
        "harness.timeout_s=300",
        "harness.overall_timeout_s=600",
        "model.recipe=",
        "model.warm_start=",
        f"model.path={waited.policy}",
        "cells.cells=2",
        "cells.ranks=2",
        "rollout.parallel=tensor",
        f"train.steps={STEPS}",
        "eval.every_steps=100",
    )
    with running(tmp_path / "job", *overrides) as job:
        job.wait_for_count(2, "cell_up", timeout_s=120.0)
        job.wait_for("execution_finished")
        # Frozen first, so that calls are in flight when it dies.
        os.kill(job.rank_pid(1, rank=1), signal.SIGSTOP)
        job.wait_for_count(3, "execution_finished")
        kill(job.rank_pid(1, rank=1))
        job.wait_for("cell_up", cell=1, incarnation=2)
        gate.close()
        assert job.exit(150.0) == 0
        job.assert_nothing_left()
    assert [(e["cell"], e["incarnation"]) for e in job.named("cell_down")] == [(1, 1)]
    assert job.summary()["failed_calls"] == 0
    assert_each_execution_ended_once(job)
    assert_each_micro_step_counts_once(job.run_dir, STEPS)
    changes = job.named("role_change")
    assert {e["role"] for e in changes} == {"train", "rollout"}
    with JournalReader(job.run_dir / "journal.db") as journal:
        calls = [call for row in journal.executions() for call in journal.calls(row.spec.execution)]
    assert max(call.reroutes for call in calls) > 0
    assert {version for call in calls for version in call.versions} == {0, 1, 2}
