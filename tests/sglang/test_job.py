"""An elastic job whose two cells have a SGLang server each: no harness notices a role change, a killed server
costs no call, and nothing is left."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from gyre.trajectory.reader import JournalReader
from tests.run.jobs import (
    ROOT,
    RunningJob,
    assert_each_execution_ended_once,
    assert_each_micro_step_counts_once,
    children,
    kill,
    running,
)
from tests.sglang.conftest import sglang_config

pytestmark = pytest.mark.timeout(1800)

STEPS = 3
UP_S = 600.0
HARNESS = str(ROOT / "examples" / "quickstart" / "harness.py")
# Executions of all steps but the first wait for the gate.
BEHIND_A_GATE = """
case "$GYRE_EXECUTION" in g000000.*|g000001.*) ;; *) flock --shared "$0" true ;; esac
exec "$@"
"""


def overrides(gate: Path) -> list[str]:
    server = sglang_config()
    variables = ", ".join(f'{name} = "{value}"' for name, value in server.environment.items())
    harness = ["sh", "-c", BEHIND_A_GATE, str(gate), "{python}", "-I", "-S", HARNESS]
    return [
        f"harness.command={json.dumps(harness)}",
        "rollout.engine=sglang",
        f"rollout.sglang.python={server.python}",
        f"rollout.sglang.environment={{{variables}}}",
        "rollout.kv_tokens=8192",
        "cells.cells=2",
        "cells.capacity_executions=16",
        # A policy that has hardly learned writes on until its turns are used: all of that fits.
        "model.context_tokens=1024",
        "model.warm_start.steps=40",
        f"train.steps={STEPS}",
        "train.groups_per_step=2",
        "train.group_size=8",
        "harness.timeout_s=600",
        "harness.overall_timeout_s=1200",
        "eval.every_steps=0",
    ]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> RunningJob:
    """When it is over: three steps with all their role changes, and in the first the satellite's server is
    killed while calls are in flight at both."""
    folder = tmp_path_factory.mktemp("job")
    gate = folder / "gate"
    with gate.open("w") as file, running(folder / "run", *overrides(gate)) as job:
        fcntl.flock(file, fcntl.LOCK_EX)
        job.wait_for_count(2, "route_opened", timeout_s=UP_S)
        job.wait_for_count(16, "harness_started", timeout_s=UP_S)
        kill(server(job, 1))
        job.wait_for_count(2, "cell_up", timeout_s=UP_S, cell=1)
        fcntl.flock(file, fcntl.LOCK_UN)
        assert job.exit(UP_S) == 0
        job.assert_nothing_left(grace_s=5.0)
    return job


def server(job: RunningJob, cell: int) -> int:
    """The server of the only rank of a cell: the child of its keeper."""
    (keeper,) = children(job.rank_pid(cell))
    (pid,) = children(keeper)
    return pid


def test_six_role_changes_and_no_failed_call(job: RunningJob) -> None:
    assert len(job.named("role_change")) >= 6
    assert job.named("call_failed") == []
    assert job.summary()["failed_calls"] == 0


def test_all_executions_and_micro_steps_count_once(job: RunningJob) -> None:
    assert_each_execution_ended_once(job)
    assert_each_micro_step_counts_once(job.run_dir, STEPS)


def test_the_cell_of_the_killed_server_came_back_and_takes_part(job: RunningJob) -> None:
    assert [event["incarnation"] for event in job.named("cell_up", cell=1)] == [1, 2]
    assert any("SGLang server ended with code 137" in str(event.get("reason")) for event in job.events)
    assert job.named("role_change", cell=1)


def test_tokens_are_of_the_versions_that_were_published(job: RunningJob) -> None:
    with JournalReader(job.run_dir / "journal.db") as journal:
        calls = [call for row in journal.executions() for call in journal.calls(row.spec.execution)]
    versions = {version for call in calls for version in call.versions}
    assert versions <= set(range(STEPS + 1))
    assert len(versions) > 1
