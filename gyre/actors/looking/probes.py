"""Counting and tracing what handlers do, while somebody wants to know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from gyre.actors.envelope import CURRENT, Envelope
from gyre.actors.errors import error_name
from gyre.actors.handlers import Handler, HandlerTable
from gyre.actors.log import log
from gyre.actors.looking.histogram import Histogram
from gyre.actors.looking.reports import HandlerReport, HandlingReport, Traced
from gyre.actors.messages import wire_name
from gyre.actors.ref import DESK

if TYPE_CHECKING:
    from gyre.actors.family import Running
    from gyre.actors.life import Life
    from gyre.actors.node import Node

COUNT_FOR_S = 300.0
LONGEST_ERROR = 500

OK, CANCELLED = "ok", "cancelled"

Sink = Callable[[Traced], None]


class _Row:
    __slots__ = ("failed", "spent")

    def __init__(self) -> None:
        self.spent = Histogram()
        self.failed = 0


class Probe:
    """What one life's handlers did, and which are under way since when."""

    __slots__ = ("_rows", "under_way")

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self.under_way: dict[int, float] = {}

    def add(self, message: str, spent_s: float, failed: bool) -> None:
        row = self._rows.get(message)
        if row is None:
            row = self._rows[message] = _Row()
        row.spent.add(spent_s)
        row.failed += failed

    def rows(self) -> tuple[HandlerReport, ...]:
        return tuple(
            HandlerReport(
                message=message,
                count=row.spent.count,
                failed=row.failed,
                seconds=row.spent.sum_s,
                p99_s=row.spent.quantile_s(0.99),
            )
            for message, row in sorted(self._rows.items())
        )


_Begun = tuple[Envelope, Probe, float]


class Probes:
    """Those of a node, while there is somebody to know: `count` was asked for lately, or a trace is on. Then
    each life has a table of handlers whose methods report here, and later its own again: a message that is
    on its way meanwhile keeps the method it came with, and at other times none passes a line of this."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.clock = node.clock or time.monotonic
        self._epoch_s = 0.0 if node.clock is not None else time.time() - time.monotonic()
        self._probes: dict[int, Probe] = {}
        self._observed: dict[HandlerTable, HandlerTable] = {}
        self._plain: dict[HandlerTable, HandlerTable] = {}
        self._sinks: dict[object, Sink] = {}
        self._followers: dict[object, Callable[[Running], None]] = {}
        self._counting_since: float | None = None
        self._until: asyncio.TimerHandle | None = None

    @property
    def on(self) -> bool:
        return self._counting_since is not None or bool(self._sinks)

    @property
    def counted_s(self) -> float:
        return 0.0 if self._counting_since is None else self.clock() - self._counting_since

    def of(self, life: Life) -> Probe | None:
        return self._probes.get(life.id)

    def count(self, for_s: float = COUNT_FOR_S) -> None:
        """Counts from now on, and until nobody has asked for so long."""
        if self._until is not None:
            self._until.cancel()
        self._until = self._node.loop.call_later(for_s, self._count_no_more)
        if self._counting_since is None:
            self._counting_since = self.clock()
            self._probes.clear()  # what a trace has counted before is of another time
            self._attach_all()

    @contextmanager
    def trace(self, sink: Sink) -> Iterator[None]:
        """Hands over each message that an actor of this node has handled."""
        key = object()
        self._sinks[key] = sink
        self._attach_all()
        try:
            yield
        finally:
            self._sinks.pop(key, None)
            self._detach_if_off()

    @contextmanager
    def following(self, follow: Callable[[Running], None]) -> Iterator[None]:
        """Tells of each process that is started from now on."""
        key = object()
        self._followers[key] = follow
        try:
            yield
        finally:
            del self._followers[key]

    # --- from the node ----------------------------------------------------------------------------

    def life_began(self, life: Life) -> None:
        if self.on:
            self._attach(life)

    async def process_began(self, process: Running) -> None:
        followers = [*self._followers.values()]
        for follow in followers:
            follow(process)
        if followers:
            # What they start asks that process in the next turn: before anybody else has its Ref.
            await asyncio.sleep(0)

    def life_ended(self, life: Life) -> None:
        self._probes.pop(life.id, None)

    def close(self) -> None:
        if self._until is not None:
            self._until.cancel()

    # --- around a handler -------------------------------------------------------------------------

    def _observe(self, handler: Handler) -> Handler:
        method, name = handler.method, wire_name(handler.message)

        async def answer(actor: Any, message: Any) -> Any:
            begun = self._begin()
            try:
                result = await method(actor, message)
            except BaseException as error:
                self._end(begun, name, _outcome(error))
                raise
            self._end(begun, name, OK)
            return result

        async def stream(actor: Any, message: Any) -> Any:
            begun = self._begin()
            try:
                async with aclosing(method(actor, message)) as items:
                    async for item in items:
                        yield item
            except BaseException as error:
                self._end(begun, name, _outcome(error))
                raise
            self._end(begun, name, OK)

        return replace(handler, method=stream if handler.streams else answer)

    def _begin(self) -> _Begun:
        envelope = CURRENT.get()
        assert envelope is not None
        probe = self._probes.get(envelope.life.id)
        if probe is None:
            probe = Probe()
            if self.on:  # else this is the last message that came while it was
                self._probes[envelope.life.id] = probe
        now = probe.under_way[envelope.id] = self.clock()
        return envelope, probe, now

    def _end(self, begun: _Begun, message: str, outcome: str) -> None:
        envelope, probe, began = begun
        spent_s = self.clock() - began
        del probe.under_way[envelope.id]
        probe.add(message, spent_s, outcome not in (OK, CANCELLED))
        if self._sinks:
            self._tell(envelope, message, began, spent_s, outcome)

    def _tell(self, envelope: Envelope, message: str, began: float, spent_s: float, outcome: str) -> None:
        life = cast("Life", envelope.life)
        traced = Traced(
            at_s=self._epoch_s + began,
            actor=life.path,
            incarnation=life.ref.incarnation,
            message=message,
            id=envelope.id,
            cause=envelope.cause,
            duration_s=spent_s,
            outcome=outcome,
        )
        for key, sink in [*self._sinks.items()]:
            try:
                sink(traced)
            except Exception as error:
                # It must not be the end of the actor that it looks at.
                log.error("trace_sink_failed", node=self._node.name, error=f"{type(error).__name__}: {error}")
                self._sinks.pop(key, None)

    # --- on and off -------------------------------------------------------------------------------

    def _count_no_more(self) -> None:
        self._counting_since = self._until = None
        self._detach_if_off()

    def _attach_all(self) -> None:
        for life in self._node.lives.values():
            self._attach(life)

    def _attach(self, life: Life) -> None:
        if life.id == DESK or life.table in self._plain:
            return
        observed = self._observed.get(life.table)
        if observed is None:
            observed = self._observed[life.table] = life.table.mapped(self._observe)
            self._plain[observed] = life.table
        life.use(observed)

    def _detach_if_off(self) -> None:
        if self.on:
            return
        for life in self._node.lives.values():
            life.use(self._plain.get(life.table, life.table))
        self._probes.clear()
        self._observed.clear()
        self._plain.clear()


def handling(life: Life, probes: Probes) -> tuple[HandlingReport, ...]:
    """What it is at."""
    probe, now = probes.of(life), probes.clock()
    under_way = {} if probe is None else probe.under_way
    return tuple(
        HandlingReport(
            message=wire_name(type(envelope.message)),
            for_s=None if envelope.id not in under_way else now - under_way[envelope.id],
        )
        for envelope in life.under_way()
    )


def _outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return CANCELLED
    text = " ".join(f"{error_name(type(error))}: {error}".split())
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."
