"""What a preset says of its harness, and what the job says to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gyre.harness.sandbox import Mount


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asks of its harness. `compact_tokens`: a prompt and its answer of so many tokens make it
    compact its context. `arguments` are added to its command line. A call may take `timeout_s`."""

    max_new_tokens: int
    compact_tokens: int
    timeout_s: float
    arguments: tuple[str, ...] = ()

    @property
    def timeout_ms(self) -> int:
        return round(self.timeout_s * 1000)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How executions of a job start their harness. Placeholders in `command`, `environment` and `files` are
    replaced for each. `files` are written into its home, by path; their suffixes say the format."""

    command: tuple[str, ...]
    environment: dict[str, str] = {}
    files: dict[str, dict[str, Any]] = {}
    mounts: tuple[Mount, ...] = ()


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A harness of a tested `version`. `install` is a command line that installs it. `launch` takes the path
    of its `program`. `own_tokens`: about as long is its first prompt without the task. `summarises` are
    words of its requests for a summary, in the system prompt or the last message. `distribution` names the
    Python package whose version is the program's."""

    name: str
    program: str
    version: str
    install: str
    launch: Callable[[str, Terms], Launch]
    own_tokens: int
    summarises: tuple[str, ...] = ()
    distribution: str | None = None


def reads_prompt(*command: str) -> tuple[str, ...]:
    """The command with the prompt as its input: one argument of a command may have 128 KiB at most."""
    return ("/bin/sh", "-c", 'exec "$@" < "$GYRE_PROMPT_FILE"', "sh", *command)
