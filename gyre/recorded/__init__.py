"""A run folder after (or while) its job ran, without the job: its executions, their trees and tokens, exports
for notebooks, what another way of sampling would have trained, scores had again. Reads one execution at a
time."""

from gyre.recorded.export import ExportError, export
from gyre.recorded.resample import Plan, Resampled, Way, resample
from gyre.recorded.rescore import Rescored, rescore
from gyre.recorded.rows import ExecutionLine, SpanLine, TrajectoryLine, lines
from gyre.recorded.run import Fate, Recorded, RecordedRun

__all__ = [
    "ExecutionLine",
    "ExportError",
    "Fate",
    "Plan",
    "Recorded",
    "RecordedRun",
    "Resampled",
    "Rescored",
    "SpanLine",
    "TrajectoryLine",
    "Way",
    "export",
    "lines",
    "resample",
    "rescore",
]
