"""What a task is, in whatever format its folder has it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

PROMPT = "prompt.md"
WORKSPACE = "workspace"
# Where a harness finds the workspace, if its task does not say.
INSIDE = "/workspace"

N = TypeVar("N", int, float)


class Part(msgspec.Struct, frozen=True):
    """A file, or what is in a folder, with which a workspace begins; `target` is its path there. Without a
    source it is an empty folder."""

    source: Path | None
    target: str


class Script(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A task's own evaluator as a command, which is run in the workspace. It finds what is in `tests`, and
    the files `beside`, in /tests, and writes its verdict below /logs/verifier: a reward, or with `junit` a
    report that pytest is made to write."""

    command: tuple[str, ...]
    tests: Path
    beside: tuple[Path, ...] = ()
    environment: dict[str, str] = {}
    timeout_s: float | None = None
    junit: bool = False


class Suite(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A task's own evaluator as hidden tests in a folder of it. With `overlay` they also lie in the
    workspace, in place of what the harness wrote there."""

    tests: str
    overlay: tuple[str, ...] = ()


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One problem. What its folder holds besides the parts is seen by the evaluator only.

    `inside` is where the workspace lies in a sandbox with walls, `environment` what its programs find set.
    `timeout_s`, `memory_bytes` and `disk_bytes` hold where they are less than the job's. `own` is the
    evaluator that it brings."""

    name: str
    folder: Path
    prompt: str
    format: Literal["gyre", "harbor", "terminal-bench", "nl2repobench"] = "gyre"
    parts: tuple[Part, ...] = ()
    inside: str = INSIDE
    environment: dict[str, str] = {}
    timeout_s: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    own: Script | Suite | None = None


def least(of_job: N, of_task: N | None) -> N:
    """A limit of the job's, or a task's where that is less."""
    return of_job if of_task is None else min(of_job, of_task)


class TasksError(Exception):
    """Tasks cannot be had: `place` (a path or a recipe) says where, `fix` what to do."""

    def __init__(self, place: str, problem: str, fix: str) -> None:
        super().__init__(f"{place}: {problem}; {fix}")
        self.place = place
        self.problem = problem
        self.fix = fix
