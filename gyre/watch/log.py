"""The configuration of structlog: every event goes to every sink, and as a plain line to stderr.

In the root process `EventLog` owns the sinks of a job: events.jsonl, metrics.jsonl and whatever else is
added (terminal, Prometheus, a tracker)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import Processor

from gyre.watch.figures import FIGURE_EVENTS, StepRewards
from gyre.watch.sinks import JsonLines, Sink, say

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class EventLog:
    """Fans events out to sinks. One is current in a process, set by `configure_logging`."""

    def __init__(self, sinks: list[Sink], least_line_level: str = "info") -> None:
        self._sinks = sinks
        self._failed: set[int] = set()
        self._least_line = _LEVELS[least_line_level]

    def add(self, sink: Sink) -> None:
        """From now on `sink` takes every event."""
        self._sinks.append(sink)

    def close(self) -> None:
        """Closes all sinks; later events only reach stderr."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._guard(sink, sink.close)

    def __call__(self, _: Any, level: str, event: MutableMapping[str, Any]) -> str:
        """The last structlog processor: gives the event to the sinks and makes its line for stderr."""
        for sink in self._sinks:
            self._guard(sink, lambda sink=sink: sink(event))
        if _LEVELS.get(level, 20) < self._least_line:
            raise structlog.DropEvent
        return line(event)

    def _guard(self, sink: Sink, call: Any) -> None:
        try:
            call()
        except Exception as error:
            if id(sink) not in self._failed:
                self._failed.add(id(sink))
                say(f"gyre: {type(sink).__name__} failed, the job goes on: {type(error).__name__}: {error}")


def configure_logging(run_dir: Path, terminal: bool, job_name: str) -> EventLog:
    """For the root process: events of level info and above go to `run_dir`/events.jsonl, `step` and
    `eval` also to metrics.jsonl, and to stderr as plain lines; with a `terminal` view only warnings do.
    Returns the log, to which further sinks can be added. Raises OSError if the files cannot be made."""
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [
        JsonLines(run_dir / "events.jsonl"),
        JsonLines(run_dir / "metrics.jsonl", FIGURE_EVENTS),
    ]
    log = EventLog(sinks, least_line_level="warning" if terminal else "info")
    _configure(log, StepRewards(), job=job_name)
    return log


def line(event: Mapping[str, Any]) -> str:
    """A plain line for people: time of day, level where it is not info, name, fields. Traces are for files,
    long values are cut."""
    rest = {k: v for k, v in event.items() if k not in _OWN}
    fields = " ".join(f"{name}={_short(value)}" for name, value in rest.items())
    level = "" if event["level"] == "info" else f"{event['level']}: "
    text = f"{event['time'][11:19]} {level}{event['event']} {fields}".rstrip()
    return f"{text}\n{event['exception']}" if "exception" in event else text


_OWN = frozenset({"event", "level", "time", "monotonic_s", "job", "exception", "trace"})
_LONGEST_VALUE = 700


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}..."
    # What a policy or a harness wrote is among it: no line break and no terminal's command comes through.
    return text if text and " " not in text and text.isprintable() else repr(text)


def _configure(log: EventLog, *before: Processor, **bound: str) -> None:
    def stamp(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["time"] = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event["monotonic_s"] = round(time.monotonic(), 6)
        event.update(bound)
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            stamp,
            *before,
            log,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=_Stderr,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_FromLibraries()]
    root.setLevel(logging.WARNING)


class _Stderr:
    def __init__(self, *_: Any) -> None:
        pass

    def msg(self, text: str) -> None:
        say(text)

    debug = info = warning = error = critical = exception = msg


class _FromLibraries(logging.Handler):
    """What libraries say through `logging` becomes the event `library_log`."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno,
            "library_log",
            logger=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info or None,
        )
