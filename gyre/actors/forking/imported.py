"""What a fork server has imported, and for whom that will do."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from importlib.machinery import PathFinder

from gyre.actors.forking.messages import ForkRequest
from gyre.actors.forking.surroundings import surroundings
from gyre.actors.forking.variables import matters, watched


class Imported:
    """What was imported, and whether a process that asks for it would have come to the same."""

    def __init__(self) -> None:
        self._before = dict(os.environ)
        self._after = self._before
        self._asked_for: set[str] = set()
        self._descriptors = descriptors()
        self._opened: set[str] = set()
        self._error = ""
        self._origins: dict[str, str] = {}
        self._fits: dict[tuple[str, ...], str] = {}

    def load(self, modules: tuple[str, ...]) -> None:
        """What is there then stays in pages that all forks share."""
        gc.disable()
        try:
            with watched(self._asked_for):
                for module in modules:
                    importlib.import_module(module)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        gc.collect()
        gc.freeze()
        self._after = dict(os.environ)
        self._opened = descriptors() - self._descriptors
        self._origins = _origins()

    def refuses(self, request: ForkRequest) -> str:
        """Why it cannot be forked from here; empty where it can."""
        if self._error:
            return self._error
        if self._opened:
            return f"an import has opened {', '.join(sorted(self._opened))}"
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            return f"an import has left {threads} threads"
        mine, its = surroundings(), request.surroundings
        if other := [name for name in sorted({*mine, *its}) if mine.get(name) != its.get(name)]:
            return f"its {other[0]} is {its.get(other[0])!r}, not {mine.get(other[0])!r}"
        path = tuple(request.boot.sys_path)
        if path not in self._fits:
            self._fits[path] = self._other_module(path)
        return self._fits[path] or self._other_variable(request.environment)

    def environment(self, asked: dict[str, str]) -> dict[str, str]:
        """With what imports have set: to be set in the fork before anything else is done there."""
        changed = {k: v for k, v in self._after.items() if self._before.get(k) != v}
        return {**asked, **changed}

    def _other_module(self, path: tuple[str, ...]) -> str:
        importlib.invalidate_caches()
        for name, origin in self._origins.items():
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.origin != origin:
                return f"its {name} is another than {origin}"
        return ""

    def _other_variable(self, asked: dict[str, str]) -> str:
        for name in sorted({*asked, *self._before}):
            if not matters(name, self._asked_for):
                continue
            if asked.get(name) not in (self._before.get(name), self._after.get(name)):
                return f"its {name} is {asked.get(name)!r}, not {self._before.get(name)!r}"
        return ""


def descriptors() -> set[str]:
    """That are open, and to what."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
    return {entry for entry in found if not entry.endswith(f"/proc/{os.getpid()}/fd")}


def _origins() -> dict[str, str]:
    """Where each package is from that is not Python's own."""
    found = {}
    for name, module in [*sys.modules.items()]:
        spec = getattr(module, "__spec__", None)
        # Not of the main module, which goes by another name.
        if "." in name or name in sys.stdlib_module_names or spec is None or spec.name != name:
            continue
        if spec.has_location:
            found[name] = spec.origin
    return found
