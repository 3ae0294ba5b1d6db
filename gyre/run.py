"""`python -m gyre.run job.toml`: read the job, build its tree, run it, say what came of it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import structlog

from gyre.actors import ExitReason
from gyre.actors import run as run_actors
from gyre.actors.token import TokenError
from gyre.cluster import cluster_token
from gyre.interrupts import Interrupts
from gyre.job import Job, JobError, load_job, resolved_toml
from gyre.runs import RunFolderError, prepare_run_folder
from gyre.tree import JobTree, reason
from gyre.watch import write_summary
from gyre.watching import Watching, open_watch

log = structlog.get_logger()

BAD_JOB, FAILED, INTERRUPTED = 2, 1, 130


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 done, 1 failed or without its last checkpoint, 2 a bad job file, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m gyre.run", description="Run a job.")
    parser.add_argument("job", type=Path, help="the job file (TOML)")
    parser.add_argument("--resume", action="store_true", help="go on at the last complete step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args(argv)
    try:
        job = load_job(arguments.job, arguments.overrides)
        prepare_run_folder(job.run_dir, resolved_toml(job), resume=arguments.resume)
        cluster_token(job)
    except (JobError, RunFolderError, TokenError) as error:
        sys.stderr.write(f"{error}\n")
        return BAD_JOB
    try:
        return run_actors(run_job(job, arguments.resume))
    except KeyboardInterrupt:  # while the loop was not there yet, or no more
        return INTERRUPTED


async def run_job(job: Job, resume: bool) -> int:
    """Runs a job in this process and its children. The first Ctrl-C drains, the second aborts."""
    began = time.monotonic()
    tree = JobTree(job, resume)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(tree.kill))
        try:
            show = open_watch(job, stack)
            async with tree, Watching(tree.status, show, job.watch.refresh_s):
                drained = await _until_over(tree, interrupts.first)
                summary = await tree.summary(time.monotonic() - began)
                if unsaved := await tree.unsaved():
                    fix = "make room, then --resume"
                    log.error("last_checkpoint_not_written", steps_lost=unsaved, fix=fix)
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
    if drained:
        return INTERRUPTED
    return FAILED if unsaved else 0


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


if __name__ == "__main__":
    sys.exit(main())
