"""Counting and tracing what handlers do, while somebody wants to know."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gyre.actors.envelope import CURRENT, Envelope
from gyre.actors.errors import error_name
from gyre.actors.handlers import Handler
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

Sink = Callable[[Traced], None]


class _Row:
    __slots__ = ("failed", "spent")

    def __init__(self) -> None:
        self.spent = Histogram()
        self.failed = 0


class Probe:
    """What one life's handlers did since it was attached. It replaces the life's table by one whose methods
    report to it, and puts the old one back: a message on its way meanwhile keeps the method it came with."""

    def __init__(self, probes: Probes, life: Life) -> None:
        self._probes = probes
        self._life = life
        self._plain = life.table
        self._rows: dict[str, _Row] = {}
        self._under_way: dict[int, float] = {}
        life.use(life.table.mapped(self._observed))

    def detach(self) -> None:
        self._life.use(self._plain)

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

    def since(self, envelope: Envelope) -> float | None:
        """For how long it has been handled."""
        began = self._under_way.get(envelope.id)
        return None if began is None else self._probes.clock() - began

    def _observed(self, handler: Handler) -> Handler:
        method, name = handler.method, wire_name(handler.message)

        async def answer(actor: Any, message: Any) -> Any:
            with self._watched(name):
                return await method(actor, message)

        async def stream(actor: Any, message: Any) -> Any:
            with self._watched(name):
                async with aclosing(method(actor, message)) as items:
                    async for item in items:
                        yield item

        return replace(handler, method=stream if handler.streams else answer)

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        envelope = CURRENT.get()
        assert envelope is not None
        clock = self._probes.clock
        began = self._under_way[envelope.id] = clock()
        outcome = "ok"
        try:
            yield
        except BaseException as error:
            outcome = _outcome(error)
            raise
        finally:
            spent_s = clock() - began
            del self._under_way[envelope.id]
            row = self._rows.setdefault(name, _Row())
            row.spent.add(spent_s)
            row.failed += outcome not in ("ok", "cancelled")
            self._probes.handled(self._life, envelope, name, began, spent_s, outcome)


class Probes:
    """Those of a node, one to each life while there is somebody to know: `count` was asked for lately, or a
    trace is on. Else none, and a message passes no line of this."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.clock = node.clock or time.monotonic
        self._epoch_s = 0.0 if node.clock is not None else time.time() - time.monotonic()
        self._attached: dict[int, Probe] = {}
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
        return self._attached.get(life.id)

    def count(self, for_s: float = COUNT_FOR_S) -> None:
        """Counts from now on, and until nobody has asked for so long."""
        if self._until is not None:
            self._until.cancel()
        self._until = self._node.loop.call_later(for_s, self._count_no_more)
        if self._counting_since is None:
            self._counting_since = self.clock()
            self._detach_all()  # what a trace has counted before is of another time
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
            self._attached[life.id] = Probe(self, life)

    def process_began(self, process: Running) -> None:
        for follow in [*self._followers.values()]:
            follow(process)

    def life_ended(self, life: Life) -> None:
        self._attached.pop(life.id, None)

    def close(self) -> None:
        if self._until is not None:
            self._until.cancel()

    # --- from the probes --------------------------------------------------------------------------

    def handled(
        self, life: Life, envelope: Envelope, message: str, began: float, spent_s: float, outcome: str
    ) -> None:
        if not self._sinks:
            return
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

    def _count_no_more(self) -> None:
        self._counting_since = self._until = None
        self._detach_if_off()

    def _attach_all(self) -> None:
        for life in self._node.lives.values():
            if life.id not in self._attached and life.id != DESK:
                self._attached[life.id] = Probe(self, life)

    def _detach_if_off(self) -> None:
        if not self.on:
            self._detach_all()

    def _detach_all(self) -> None:
        for probe in self._attached.values():
            probe.detach()
        self._attached.clear()


def handling(life: Life, probe: Probe | None) -> tuple[HandlingReport, ...]:
    """What it is at."""
    return tuple(
        HandlingReport(
            message=wire_name(type(envelope.message)),
            for_s=None if probe is None else probe.since(envelope),
        )
        for envelope in life.under_way()
    )


def _outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    text = " ".join(f"{error_name(type(error))}: {error}".split())
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."
