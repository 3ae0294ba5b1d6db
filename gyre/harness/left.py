"""What an execution left, and the folder in which one attempt at its evaluation is made."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gyre.harness.commands import base_environment
from gyre.harness.sandbox import Confined, Limits, Mount, Sandbox
from gyre.harness.task import INSIDE


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be evaluated: a workspace in which nothing runs any more, and the folder of its task.
    `folder` is where copies and logs may be made."""

    execution: str
    workspace: Path
    task: Path
    folder: Path
    mark: str


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt: `folder` has a fresh copy of the workspace, which a sandbox with walls shows as
    `inside`, an empty home and an empty tmp."""

    left: Left
    folder: Path
    inside: str = INSIDE

    @property
    def workspace(self) -> Mount:
        return Mount(host=self.folder / "workspace", inside=self.inside, writable=True)

    @property
    def log(self) -> Path:
        return self.left.folder / "evaluator.log"

    def confined(
        self, command: tuple[str, ...], mounts: tuple[Mount, ...], sandbox: Sandbox, limits: Limits
    ) -> Confined:
        """A command in the copy, without a network."""
        home = Mount(host=self.folder / "home", inside="/home/agent", writable=True)
        temporary = Mount(host=self.folder / "tmp", inside="/tmp", writable=True)
        return Confined(
            command=command,
            environment=base_environment(sandbox.path(home), sandbox.path(temporary)),
            workspace=self.workspace,
            mounts=(home, temporary, *mounts),
            socket=None,
            mark=self.left.mark,
            limits=limits,
        )
