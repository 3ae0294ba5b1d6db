"""Where events go: a sink takes every event of the root process, in order."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

Event = Mapping[str, Any]
"""One thing that happened: `event` is its name, `level`, `time` (ISO 8601, UTC), `monotonic_s`, and its
own fields."""


class Sink(Protocol):
    """Takes events. It is called on the event loop: it must be quick."""

    def __call__(self, event: Event) -> None:
        """Takes one event. What it raises is reported, once, and harms nobody."""

    def close(self) -> None:
        """Takes no more."""


class JsonLines:
    """Appends events to a file, one JSON object a line; with `names`, only those events.

    A full disk must not stop a job: a line that cannot be written is lost, which is said once on stderr,
    and writing goes on when there is room again. A line is in the file whole or not at all.
    """

    def __init__(self, path: Path, names: frozenset[str] | None = None) -> None:
        self._path = path
        self._names = names
        self._file: int | None = None
        self._lost = 0
        self._open()

    def __call__(self, event: Event) -> None:
        if self._names is not None and event["event"] not in self._names:
            return
        line = msgspec.json.encode(event, enc_hook=str) + b"\n"
        try:
            self._append(line)
        except OSError as error:
            self._lost += 1
            if self._lost == 1:
                say(f"gyre: {self._path}: {error.strerror}; events are lost until it can be written again")
        else:
            if self._lost:
                say(f"gyre: {self._path}: written again, {self._lost} events were lost")
            self._lost = 0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._file

    def _append(self, line: bytes) -> None:
        file = self._open()
        before = os.fstat(file).st_size
        done = 0
        try:
            while done < len(line):
                done += os.write(file, line[done:])
        except OSError:
            if done:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, before)
            raise


def say(text: str) -> None:
    """A line to stderr, which is looked up anew so that a live view may stand in for it. A stderr that
    takes nothing more (a full disk, a closed pipe) is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
