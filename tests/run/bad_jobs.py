"""Jobs for the tests of bad input: a tiny policy, tasks whose names say what goes wrong, two cells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from gyre.cell.recipes import model_folder
from gyre.run import main
from tests.run.jobs import ROOT, processes, wait_gone

HERE = Path(__file__).parent

JOB = """
[model]
path = "{model}"
dtype = "float32"
context_tokens = 512

[cluster]
device = "cpu"

[cells]
cells = 2
capacity_executions = 24

[rollout]
max_new_tokens = 4
kv_tokens = 8192
max_batch = 24

[harness]
command = ["{{python}}", "-I", "-S", "{here}/bad_harness.py"]
sandbox = "process"
timeout_s = 18
attempts = 2
refills = 0

[tasks]
path = "tasks"

[evaluator]
command = ["{{python}}", "-I", "-S", "{here}/bad_evaluator.py", "{{workspace}}", "{{task}}"]
sandbox = "process"
timeout_s = 6
attempts = 2

[train]
steps = 1
groups_per_step = {groups}
group_size = 3
micro_step_tokens = 1024
"""


def policy() -> Path:
    """The quickstart's, as its recipe writes it: untrained."""
    return model_folder(f"{ROOT / 'examples' / 'quickstart' / 'policy.py'}:write_model")


def copied_policy(folder: Path) -> Path:
    """One to be damaged."""
    return Path(shutil.copytree(policy(), folder))


def write_tasks(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "prompt.md").write_text("tidy\n")
    return folder


def write_job(folder: Path, *tasks: str) -> Path:
    """A job of one step with a group a task."""
    write_tasks(folder / "tasks", *tasks)
    job = folder / "job.toml"
    job.write_text(JOB.format(model=policy(), here=HERE, groups=len(tasks)))
    return job


class Ended(NamedTuple):
    """How a start ended. `why` is the last line that it said."""

    code: int
    output: str
    errors: str

    @property
    def why(self) -> str:
        return self.errors.splitlines()[-1]


def start(job: Path, run_dir: Path, *overrides: str, resume: bool = False, timeout_s: float = 120.0) -> Ended:
    """Runs a job that is not to get far, in a process of its own."""
    environment = {**os.environ, "GYRE_TEST_RUN": f"{run_dir}/start"}
    ran = subprocess.run(
        [sys.executable, "-m", "gyre.run", *_arguments(job, run_dir, overrides, resume)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return _checked(run_dir, Ended(ran.returncode, ran.stdout, ran.stderr))


def start_here(
    capsys: pytest.CaptureFixture[str], job: Path, run_dir: Path, *overrides: str, resume: bool = False
) -> Ended:
    """The same in this process, which is five times as quick: for many variants of one fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GYRE_TEST_RUN", f"{run_dir}/start")
        code = main(_arguments(job, run_dir, overrides, resume))
    return _checked(run_dir, Ended(code, *capsys.readouterr()))


def _arguments(job: Path, run_dir: Path, overrides: Sequence[str], resume: bool) -> list[str]:
    sets = [word for override in (f"run_dir={run_dir}", *overrides) for word in ("--set", override)]
    return [str(job), *sets, *(["--resume"] if resume else [])]


def _checked(run_dir: Path, ended: Ended) -> Ended:
    """No process is left, and nothing that was said is a trace."""
    assert not wait_gone(processes(run_dir / "start"), 20.0)
    assert "Traceback" not in ended.errors + ended.output
    assert all(len(line) < 1000 for line in ended.errors.splitlines())
    return ended
