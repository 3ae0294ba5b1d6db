"""A job over two machines, which are two network namespaces joined by a veth pair."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from gyre.trajectory.reader import JournalReader
from tests.run.conftest import Waited
from tests.run.jobs import (
    ROOT,
    RunningJob,
    assert_each_execution_ended_once,
    assert_each_micro_step_counts_once,
    environment,
    joined_folder,
    running,
)
from tests.run.test_faults import BEHIND_GATES, HARNESS, Gates

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(550),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces take root and iproute2"
    ),
]

STEPS = 3
GYRE = "from gyre.cli import app; app()"


class Machine(NamedTuple):
    """Another machine, and the address by which it reaches this one."""

    namespace: str
    here: str
    there: str

    def join(self, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
        """`gyre join` there."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, sys.executable, "-c", GYRE, "join", *arguments],
            cwd=ROOT,
            env=environment(run_dir, forks=True),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextmanager
def second_machine() -> Iterator[Machine]:
    tag = secrets.token_hex(3)
    namespace, ours, theirs = f"gyre-{tag}", f"gy{tag}a", f"gy{tag}b"
    net = f"10.{200 + int(tag[:1], 16)}.{int(tag[1:3], 16)}"
    machine = Machine(namespace, f"{net}.1", f"{net}.2")
    inside = f"ip -n {namespace}"
    try:
        for command in (
            f"ip netns add {namespace}",
            f"ip link add {ours} type veth peer name {theirs} netns {namespace}",
            f"ip addr add {machine.here}/24 dev {ours}",
            f"ip link set {ours} up",
            f"{inside} addr add {machine.there}/24 dev {theirs}",
            f"{inside} link set {theirs} up",
            f"{inside} link set lo up",
        ):
            subprocess.run(command.split(), check=True)
        yield machine
    finally:
        subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", namespace], check=False)


class Played(NamedTuple):
    """The job when it is over, the folders in shared memory of those that joined, and what two of the
    machines said: that with the wrong token, the last one."""

    job: RunningJob
    there: str
    folders: tuple[Path, Path]
    wrong: tuple[int, str]
    left: tuple[int, str]


@pytest.fixture(scope="module")
def played(waited: Waited, tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("machines")
    with second_machine() as machine:
        return play(folder, waited.policy, machine)


def play(folder: Path, policy: Path, machine: Machine) -> Played:
    """Step 0 with a cell there; then that machine is killed, and step 1 is made without it; another joins,
    takes the cell and is told to leave while it has calls in flight, in step 2."""
    gates = Gates(folder / "gates")
    harness = ["sh", "-c", BEHIND_GATES, str(folder / "gates"), "{python}", "-I", "-S", HARNESS]
    overrides = [
        f"cluster.listen={machine.here}:0",
        "cluster.nodes=1",
        f"harness.command={json.dumps(harness)}",
        "harness.timeout_s=300",
        "harness.overall_timeout_s=600",
        "model.recipe=",
        "model.warm_start=",
        f"model.path={policy}",
        f"train.steps={STEPS}",
        "train.groups_per_step=2",
        "train.group_size=16",
        # Two trajectories a micro-step, so that there is work for all cells.
        "model.context_tokens=256",
        "train.micro_step_tokens=256",
        "eval.every_steps=0",
    ]
    with running(folder / "job", *overrides) as job:
        listening = job.wait_for("cluster_listening", timeout_s=120.0)
        address = listening["join"].split()[2]
        token = str(job.run_dir / "token")
        wrong_token = folder / "wrong"
        wrong_token.write_text(secrets.token_hex(32))
        wrong_token.chmod(0o600)
        refused = machine.join(job.run_dir, address, "--token-file", str(wrong_token))
        said, _ = refused.communicate(timeout=60)
        wrong = (refused.returncode, said)

        second = machine.join(job.run_dir, address, "--token-file", token, "--name", "second")
        job.wait_for_count(3, "cell_up", timeout_s=120.0)
        gates.open("g000000", "g000001")
        job.wait_for("step", step=0)
        folder_of_second = joined_folder(second.pid)
        second.kill()
        second.communicate(timeout=60)
        job.wait_for("cell_down", cell=1)
        gates.open("g000002", "g000003")
        job.wait_for("step", step=1)

        third = machine.join(job.run_dir, address, "--token-file", token, "--name", "third")
        job.wait_for("cell_up", cell=1, incarnation=2)
        job.wait_for("route_opened", cell=1)
        folders = (folder_of_second, joined_folder(third.pid))
        gates.open("g000004")
        third.send_signal(signal.SIGINT)
        said, _ = third.communicate(timeout=120)
        left = (third.returncode, said)
        gates.open("g000005")
        assert job.exit(120.0) == 0
        job.assert_nothing_left()
    return Played(job, machine.there, folders, wrong, left)


def test_a_wrong_token_is_refused_with_one_line_on_both_sides(played: Played) -> None:
    code, said = played.wrong
    assert code == 3
    (line,) = said.splitlines()
    assert line.endswith(": wrong token")
    assert [event["why"] for event in played.job.named("peer_refused")] == ["refused: wrong token"]


def test_the_right_token_makes_it_a_node_that_cells_are_placed_on(played: Played) -> None:
    joined = played.job.named("node_joined")
    assert [event["node"] for event in joined] == ["second", "third"]
    assert all(event["endpoint"].startswith(f"tcp:{played.there}:") for event in joined)
    placed = played.job.named("cell_placed")
    assert [(event["cell"], event["node"]) for event in placed] == [(1, "second"), (1, "third")]


def test_a_cell_on_the_other_machine_generates_and_trains(played: Played) -> None:
    with JournalReader(played.job.run_dir / "journal.db") as journal:
        assert (1, 1) in {(m.cell, m.incarnation) for m in journal.contributions(0)}
    assert played.job.named("role_change", cell=1, role="train")


def test_the_quickstart_reaches_its_end_whatever_machine_goes(played: Played) -> None:
    job = played.job
    assert job.summary()["steps"] == STEPS
    assert job.summary()["failed_calls"] == 0
    assert_each_execution_ended_once(job)
    assert_each_micro_step_counts_once(job.run_dir, STEPS)


def test_a_machine_that_is_killed_is_lost_with_its_cells(played: Played) -> None:
    (lost,) = played.job.named("node_lost")
    assert (lost["node"], lost["cells"]) == ("second", [1])
    (died,) = [e for e in played.job.named("cell_down", cell=1) if e["incarnation"] == 1]
    assert "stopped" not in died["reason"]


def test_a_machine_that_is_interrupted_is_drained(played: Played) -> None:
    code, said = played.left
    assert code == 0, said
    assert "left" in said.splitlines()[-1]
    (left,) = played.job.named("node_left")
    assert left["node"] == "third"
    assert played.job.named("cell_not_retired") == []
    (down,) = [e for e in played.job.named("cell_down", cell=1) if e["incarnation"] == 2]
    assert "stopped" in down["reason"]


def test_nothing_of_it_is_left_in_shared_memory(played: Played) -> None:
    """The killed one's folder went when the next came."""
    assert len({*played.folders}) == 2
    assert not any(folder.exists() for folder in played.folders)
