"""`python -m gyre.run job.toml`: read the job, build its tree, run it, say what came of it."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec
import structlog

from gyre.actors import ExitReason
from gyre.actors import run as run_actors
from gyre.job import Job, JobError, load_job, resolved_toml, warnings
from gyre.runs import RunFolderError, prepare_run_folder
from gyre.schedule.messages import ScheduleStatus
from gyre.tree import JobTree, reason
from gyre.watch import MetricsServer, TerminalView, configure_logging, open_tracker, write_summary
from gyre.watching import Watching

log = structlog.get_logger()

BAD_JOB, FAILED, INTERRUPTED = 2, 1, 130


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed, 2 a bad job file, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m gyre.run", description="Run a job.")
    parser.add_argument("job", type=Path, help="the job file (TOML)")
    parser.add_argument("--resume", action="store_true", help="go on at the last complete step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args(argv)
    try:
        job = load_job(arguments.job, arguments.overrides)
        prepare_run_folder(job.run_dir, resolved_toml(job), resume=arguments.resume)
    except (JobError, RunFolderError) as error:
        print(error, file=sys.stderr)
        return BAD_JOB
    return run_actors(run_job(job, arguments.resume))


async def run_job(job: Job, resume: bool) -> int:
    """Runs a job in this process and its children. The first Ctrl-C drains, the second aborts."""
    began = time.monotonic()
    tree = JobTree(job, resume)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(tree.kill))
        try:
            show = _open_watch(job, stack)
            async with tree, Watching(tree.status, show, job.watch.refresh_s):
                drained = await _until_over(tree, interrupts.first)
                summary = await tree.summary(time.monotonic() - began)
        except (Exception, asyncio.CancelledError) as error:
            if interrupts.aborted:
                log.warning("aborted")
                return INTERRUPTED
            if isinstance(error, asyncio.CancelledError):
                raise
            log.error("job_failed", reason=reason(error), trace=ExitReason.of(error).traces)
            return FAILED
    try:
        write_summary(job.run_dir, summary)
    except OSError as error:
        log.warning("summary_not_written", reason=str(error))
    return INTERRUPTED if drained else 0


def _open_watch(job: Job, stack: ExitStack) -> list[Callable[[ScheduleStatus], None]]:
    """The sinks that the job file asks for; what is to be shown the status again and again."""
    terminal = sys.stderr.isatty()
    events = configure_logging(job.run_dir, terminal, job.name)
    stack.callback(events.close)
    for fault in warnings(job):
        log.warning("unlikely_job", fault=str(fault))
    show: list[Callable[[ScheduleStatus], None]] = []
    if job.watch.tracker != "none":
        events.add(
            open_tracker(job.watch.tracker, job.run_dir, job.name, msgspec.to_builtins(job, enc_hook=str))
        )
    if job.watch.prometheus_port:
        server = MetricsServer(job.watch.prometheus_port)
        events.add(server)
        show.append(server.update)
    if terminal:
        view = stack.enter_context(TerminalView(job.name, job.cells.capacity_executions))
        events.add(view)
        show.append(view.update)
    return show


async def _until_over(tree: JobTree, interrupted: asyncio.Event) -> bool:
    """Whether it was drained before it was over."""
    over = asyncio.create_task(tree.wait())
    interrupt = asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait((over, interrupt), return_when=asyncio.FIRST_COMPLETED)
        drained = not over.done()
        if drained:
            await tree.drain()
        await over
        return drained
    finally:
        over.cancel()
        interrupt.cancel()


class Interrupts:
    """SIGINT and SIGTERM within the block: the first sets `first`, the second calls `abort` and cancels the
    task that entered the block."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self.first = asyncio.Event()
        self.aborted = False

    def __enter__(self) -> Self:
        self._job = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        if not self.first.is_set():
            self.first.set()
        elif not self.aborted and self._job is not None:
            self.aborted = True
            self._abort()
            self._job.cancel()


if __name__ == "__main__":
    sys.exit(main())
