"""Whose end concerns one life: those it monitors, and those it is linked with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.actors.errors import ExitReason
from gyre.actors.messages import Down
from gyre.actors.ref import Ref

if TYPE_CHECKING:
    from gyre.actors.local import LocalTarget


class Bonds:
    """A monitor is one-sided and tells; a link is that of both, and what one dies of the other dies of."""

    __slots__ = ("_life", "_linked", "_monitored")

    def __init__(self, life: LocalTarget) -> None:
        self._life = life
        self._monitored: dict[Ref, None] = {}
        self._linked: dict[Ref, None] = {}

    def monitor(self, ref: Ref) -> None:
        self._monitored[ref] = None
        ref.target.watch(ref, self._life)

    def demonitor(self, ref: Ref) -> None:
        self._monitored.pop(ref, None)
        self._unwatch(ref)

    def link(self, ref: Ref) -> None:
        if ref == self._life.ref:
            raise ValueError(f"{ref.label} cannot be linked with itself")
        self._linked[ref] = None
        ref.target.tie(ref, self._life)

    def unlink(self, ref: Ref) -> None:
        self.untied(ref)
        ref.target.untie(ref, self._life)

    def tied(self, ref: Ref) -> None:
        """The other one has linked itself with this life."""
        self._linked[ref] = None
        ref.target.watch(ref, self._life)

    def untied(self, ref: Ref) -> None:
        """It no longer is."""
        self._linked.pop(ref, None)
        self._unwatch(ref)

    def over(self, down: Down) -> bool:
        """Ends this life where it was linked with that one; whether it is to be told:
        of the end of one that it is only linked with it is not."""
        ref, reason = down.ref, down.reason
        monitored = ref in self._monitored
        linked = ref in self._linked
        self._monitored.pop(ref, None)
        self._linked.pop(ref, None)
        if linked and reason.abnormal:
            message = f"{ref.label}, which it is linked with, died: {reason}"
            self._life.crash(ExitReason(kind="error", message=message, cause=reason))
        return monitored or not linked

    def close(self) -> None:
        """This life is over."""
        for ref in {**self._monitored, **self._linked}:
            ref.target.unwatch(ref, self._life)

    def _unwatch(self, ref: Ref) -> None:
        if ref not in self._monitored and ref not in self._linked:
            ref.target.unwatch(ref, self._life)
