"""Metrics of a job for Prometheus, over HTTP on this host."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gyre.cell.messages import CellStatus
from gyre.schedule.messages import ScheduleStatus
from gyre.watch.figures import figures
from gyre.watch.sinks import Event

_SCHEDULE = {
    "step": "Committed steps",
    "steps": "Steps of the job",
    "published": "Published weight version",
    "ready_micro_steps": "Micro-steps that can be claimed",
    "calls": "Calls in flight at the proxy, as the policy sees them",
    "waiting_calls": "Calls in flight beyond what the cells in rollout serve at a time",
}
_SCHEDULE_COUNTERS = {
    "dispatched": ("executions_dispatched", "Executions dispatched, d(t)"),
    "started": ("executions_started", "Executions started, p(t)"),
    "finished": ("executions_finished", "Executions finished, f(t)"),
    "role_changes": ("role_changes", "Role changes of cells"),
    "role_changes_with_calls_in_flight": (
        "role_changes_with_calls_in_flight",
        "Role changes during which calls were handed over",
    ),
    "role_changes_turned_back": ("role_changes_turned_back", "Role changes undone, no longer wanted"),
    "role_changes_failed": ("role_changes_failed", "Role changes undone after a state of theirs failed"),
    "calls_moved": ("calls_moved", "Calls in flight that role changes handed over"),
}
_CELL = {
    "version": "Weight version that the cell holds",
    "tokens_per_s": "Tokens a second, generated or trained",
    "busy_fraction": "Part of the time that the cell computed",
}
_ENGINE = {
    "running": "Calls running",
    "waiting": "Calls waiting",
    "kv_blocks_used": "KV blocks in use",
    "kv_blocks_total": "KV blocks there are",
    "kv_blocks_pinned": "KV blocks that another engine reads",
    "kv_bytes_resting": "Bytes of host memory with KV of idle sessions of a cell that trains",
}
_ENGINE_COUNTERS = {
    "generated_tokens": "Tokens generated",
    "prefilled_tokens": "Prompt tokens computed",
    "cached_tokens": "Prompt tokens reused",
    "preemptions": "Calls that gave their KV up to others",
    "kv_tokens_imported": "Tokens whose KV came from another engine",
    "kv_imports_refused": "Sessions whose KV was to come and did not",
    "kv_tokens_rested": "Tokens whose KV went to host memory when the cell left rollout",
    "kv_tokens_put_back": "Tokens whose KV was there when the cell came back",
    "kv_rests_dropped": "Sessions whose KV rested and was of other weights, or not whole, by then",
    "mixed_tokens": "Tokens sampled over KV of older weights",
    "busy_s": "Seconds of computing",
}


class PortTaken(RuntimeError):
    """The metrics cannot be served on the port that the job file names."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"watch.prometheus_port = {port}: the port is in use; name another one, or 0 for no metrics"
        )
        self.port = port


class MetricsServer:
    """Serves /metrics on 127.0.0.1:`port` from a thread of its own. It is a sink, and is given a status
    whenever there is one. Raises PortTaken."""

    def __init__(self, port: int) -> None:
        self._metrics = _JobMetrics()
        registry = CollectorRegistry()
        registry.register(self._metrics)
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(port) from error
            raise

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def __call__(self, event: Event) -> None:
        self._metrics.events[event["event"]] += 1
        if (found := figures(event)) is not None:
            self._metrics.figures |= found.values

    def update(self, status: ScheduleStatus) -> None:
        """What is served from now on."""
        self._metrics.status = status

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _JobMetrics(Collector):
    def __init__(self) -> None:
        self.status: ScheduleStatus | None = None
        self.events: Counter[str] = Counter()
        self.figures: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """Called in the server's thread, for each scrape."""
        events = CounterMetricFamily("gyre_events", "Events of the job", labels=["event"])
        for name, count in self.events.copy().items():
            events.add_metric([name], count)
        yield events
        for name, value in self.figures.copy().items():
            yield GaugeMetricFamily(f"gyre_{name.replace('/', '_')}", f"Latest {name}", value=value)
        if self.status is not None:
            yield from _schedule(self.status)
            yield from _cells(self.status.cells)

    def describe(self) -> Iterator[Metric]:
        return iter(())


def _schedule(status: ScheduleStatus) -> Iterator[Metric]:
    for field, text in _SCHEDULE.items():
        yield GaugeMetricFamily(f"gyre_{field}", text, value=getattr(status, field))
    for field, (name, text) in _SCHEDULE_COUNTERS.items():
        yield CounterMetricFamily(f"gyre_{name}", text, value=getattr(status, field))
    unfinished = status.dispatched - status.finished
    yield GaugeMetricFamily("gyre_unfinished_executions", "Waterlevel, w(t)", value=unfinished)


def _cells(cells: tuple[CellStatus, ...]) -> Iterator[Metric]:
    training = _per_cell(GaugeMetricFamily, "training", "1 in train role, 0 in rollout role")
    changing = _per_cell(GaugeMetricFamily, "changing", "1 while the cell changes its role")
    micro_steps = _per_cell(CounterMetricFamily, "micro_steps", "Micro-steps computed")
    for cell in cells:
        labels = [str(cell.cell)]
        training.add_metric(labels, cell.role == "train")
        changing.add_metric(labels, cell.changing)
        micro_steps.add_metric(labels, cell.micro_steps)
    yield from (training, changing, micro_steps)
    for field, text in _CELL.items():
        yield _filled(_per_cell(GaugeMetricFamily, field, text), cells, lambda c, f=field: getattr(c, f))
    for field, text in _ENGINE.items():
        family = _per_cell(GaugeMetricFamily, f"engine_{field}", text)
        yield _filled(family, cells, lambda c, f=field: getattr(c.engine, f))
    for field, text in _ENGINE_COUNTERS.items():
        family = _per_cell(CounterMetricFamily, f"engine_{field}", text)
        yield _filled(family, cells, lambda c, f=field: getattr(c.engine, f))


def _per_cell(family: Any, name: str, text: str) -> Any:
    return family(f"gyre_cell_{name}", text, labels=["cell"])


def _filled(family: Any, cells: tuple[CellStatus, ...], read: Any) -> Metric:
    for cell in cells:
        family.add_metric([str(cell.cell)], read(cell))
    result: Metric = family
    return result
