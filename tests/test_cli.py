from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre.cli import app
from tests.job.conftest import job_file

__all__ = ["job_file"]


def test_check_prints_the_resolved_job_and_the_plan(job_file: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(job_file), "--set", "train.steps=7"])
    assert result.exit_code == 0
    assert "steps = 7" in result.stdout
    assert "# dispatch depth: Q_b = 4 groups, 32 executions" in result.stdout
    assert "# memory: unknown until the model is built" in result.stdout
    (tmp_path / "again.toml").write_text(result.stdout)
    again = CliRunner().invoke(app, ["check", str(tmp_path / "again.toml")])
    assert again.stdout == result.stdout


def test_check_of_a_bad_job_names_all_faults_and_exits_with_2(job_file: Path) -> None:
    result = CliRunner().invoke(
        app, ["check", str(job_file), "--set", "cells.cels=3", "--set", "train.steps=0"]
    )
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "2 faults" in result.stderr
    assert "cells.cels: unknown key" in result.stderr
    assert "did you mean cells.cells?" in result.stderr
    assert "train.steps: found 0" in result.stderr


def test_check_builds_the_options_of_a_harness_actor(job_file: Path) -> None:
    (job_file.parent / "own.py").write_text(
        "import msgspec\nfrom gyre.harness import Harness\n"
        "class Options(msgspec.Struct):\n    turns: int = 3\n"
        "class Own(Harness):\n    def __init__(self, options: Options) -> None: ...\n"
    )
    own = ["--set", "harness.command=", "--set", "harness.actor=own.py:Own"]
    right = CliRunner().invoke(app, ["check", str(job_file), *own, "--set", "harness.options.turns=4"])
    assert right.exit_code == 0
    assert "turns = 4" in right.stdout
    wrong = CliRunner().invoke(app, ["check", str(job_file), *own, "--set", "harness.options.turn=4"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "harness.options.turn: unknown key; Options has turns; did you mean" in wrong.stderr


def test_check_warns_and_goes_on(job_file: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(job_file), "--set", "loss.clip_high=0.2"])
    assert result.exit_code == 0
    assert "warning: loss.clip_high" in result.stderr


def test_run_hands_its_arguments_on(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pytest.importorskip("gyre.run")
    seen: list[list[str]] = []
    monkeypatch.setattr(run, "main", lambda arguments: seen.append(arguments) or 130)
    result = CliRunner().invoke(
        app, ["run", str(job_file), "--resume", "--set", "train.lr=0", "--set", "seed=1"]
    )
    assert result.exit_code == 130
    assert seen == [[str(job_file), "--resume", "--set", "train.lr=0", "--set", "seed=1"]]


def test_check_needs_no_torch(job_file: Path) -> None:
    code = f"""
import sys
from gyre.cli import app
app(["check", {str(job_file)!r}], standalone_mode=False)
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=50)
