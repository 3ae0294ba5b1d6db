"""What people look at: the event log, metrics, the live terminal view, trackers, the summary.

Everything is fed by one stream of events (structlog) through sinks, and by the statuses that the
job's actors give when asked."""

from gyre.watch.log import EventLog, configure_logging
from gyre.watch.prometheus import MetricsServer, PortTaken
from gyre.watch.sinks import Event, Sink
from gyre.watch.summary import Summary, write_summary
from gyre.watch.terminal import TerminalView
from gyre.watch.trackers import Tracker, TrackerError, open_tracker

__all__ = [
    "Event",
    "EventLog",
    "MetricsServer",
    "PortTaken",
    "Sink",
    "Summary",
    "TerminalView",
    "Tracker",
    "TrackerError",
    "configure_logging",
    "open_tracker",
    "write_summary",
]
