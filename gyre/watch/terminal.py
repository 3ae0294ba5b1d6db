"""The live view of a job in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gyre.cell.messages import CellStatus
from gyre.schedule.messages import ScheduleStatus
from gyre.watch.sinks import Event


class Eta:
    """Seconds until the last step, from the pace of the last steps. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float], window_steps: int = 8) -> None:
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=window_steps + 1)

    def update(self, step: int) -> None:
        """`step` steps are committed."""
        if not self._seen or step > self._seen[-1][0]:
            self._seen.append((step, self._clock()))

    def seconds(self, steps: int) -> float | None:
        """None until one step was seen from its start to its end."""
        if len(self._seen) < 2:
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        pace = (ended - began) / (last - first)
        return max(0.0, pace * (steps - last) - (self._clock() - ended))


class TerminalView:
    """Step, rewards, waterlevel and a line per cell. It is a sink (for the rewards) and is given a status
    at each refresh; between two refreshes it costs nothing. Use as a context manager."""

    def __init__(
        self,
        job_name: str,
        capacity_executions: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = job_name
        self._capacity = capacity_executions
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._began = clock()
        self._eta = Eta(clock)
        self._train_reward: float | None = None
        self._eval_score: float | None = None
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> TerminalView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        if event["event"] == "step":
            self._train_reward = event.get("reward")
        elif event["event"] == "eval":
            self._eval_score = event.get("score")

    def update(self, status: ScheduleStatus) -> None:
        """Shows a status."""
        self._eta.update(status.step)
        self._live.update(self.render(status), refresh=True)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        self._live.stop()

    def render(self, status: ScheduleStatus) -> RenderableType:
        """The view of a status."""
        return Group(self._head(status), self._waterlevel(status), _cells(status.cells))

    def _head(self, status: ScheduleStatus) -> RenderableType:
        left = self._eta.seconds(status.steps)
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(self._name, style="bold"),
            f"step {status.step}/{status.steps}",
            ProgressBar(total=max(1, status.steps), completed=status.step, width=24),
            f"reward {_number(self._train_reward)}",
            f"eval {_number(self._eval_score)}",
            f"elapsed {_clock_time(self._clock() - self._began)}",
            f"ETA {'-' if left is None else _clock_time(left)}",
        )
        return row

    def _waterlevel(self, status: ScheduleStatus) -> RenderableType:
        unfinished = status.dispatched - status.finished
        rollout = sum(cell.role == "rollout" and not cell.changing for cell in status.cells)
        return Text(
            f"waterlevel w={unfinished} C_R={rollout * self._capacity}"
            f"  executions {status.finished}/{status.dispatched}"
            f"  micro-steps ready {status.ready_micro_steps}"
            f"  published v{status.published}"
            f"  role changes {status.role_changes}"
            f" ({status.role_changes_with_calls_in_flight} under calls)"
        )


def _cells(cells: tuple[CellStatus, ...]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading in ("cell", "role", "version"):
        table.add_column(heading)
    for heading in ("queue", "tokens/s", "busy", "micro-steps"):
        table.add_column(heading, justify="right")
    for cell in cells:
        style = "yellow" if cell.changing else "cyan" if cell.role == "train" else "green"
        table.add_row(
            f"{cell.cell} core" if cell.cell == 0 else str(cell.cell),
            Text(f"{cell.role} (changing)" if cell.changing else cell.role, style=style),
            f"v{cell.version}",
            f"{cell.engine.running}+{cell.engine.waiting}",
            f"{cell.tokens_per_s:.0f}",
            f"{cell.busy_fraction:.0%}",
            str(cell.micro_steps),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
