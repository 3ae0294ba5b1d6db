"""What a child is and how it is kept alive."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from gyre.actors.actor import Actor
    from gyre.actors.ref import Ref

Restart = Literal["permanent", "transient", "temporary"]
Strategy = Literal["one_for_one", "rest_for_one", "one_for_all"]

MAILBOX = 1024
_NAME = re.compile(r"[\w.:-]{1,100}")


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for an actor: letters, digits and _ . : - only, 100 at most")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """An actor in this process. `start` makes a new one for each life.

    permanent: restarted however it ends; transient: when it ends abnormally; temporary: never, and its
    crash must be known to someone who monitors it, else it is its parent's crash.
    `shutdown_s` is the time it gets to stop; `mailbox` the messages that may wait in it.
    """

    name: str
    start: Callable[[], Actor]
    restart: Restart = "permanent"
    shutdown_s: float = 5.0
    mailbox: int = MAILBOX

    def __post_init__(self) -> None:
        _check(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """An actor in a process of its own, `actor` named `package.module:Class`.

    `config`, its constructor's only argument, is a msgspec Struct and may hold Refs. `environment` is set
    on top of this process' own. What the process prints goes to `log_path`, or only its last lines are
    kept. The process has `start_timeout_s` until its actor has started. With `fork` it is forked where this
    machine has a fork server that has imported what it needs, else started as any other.

    With `node`, what `Node.reach` answers, the process is one of that node's machine: `actor` is imported
    and `log_path` written there. It is supervised all the same, and restarted where it ran; but when the
    node is gone it is not restarted, and as with a temporary one who monitors it decides what comes next.
    `former_lives`: how many lives this name has had elsewhere; incarnations go on from there.
    `inherits`: descriptors of this process that each life has too, under the same numbers; such a process is
    never forked, and of this machine.
    """

    name: str
    actor: str
    config: msgspec.Struct | msgspec.Raw | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    log_path: Path | None = None
    restart: Restart = "permanent"
    shutdown_s: float = 5.0
    start_timeout_s: float = 120.0
    mailbox: int = MAILBOX
    fork: bool = False
    node: Ref | None = None
    former_lives: int = 0
    inherits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self.name)
        module, _, cls = self.actor.partition(":")
        if not module or not cls:
            raise ValueError(f"{self.actor!r}: name the actor as package.module:Class")
        if module == "__main__":
            fix = "write it into a module, which the other process can import"
            raise ValueError(f"{self.actor!r} is of this script or notebook: {fix}")
        if self.inherits and (self.fork or self.node is not None):
            raise ValueError(f"{self.name}: what inherits descriptors is neither forked nor elsewhere")


Spec = ChildSpec | ProcessSpec
