"""What `gyre inspect RUN` and `gyre resample RUN` print."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gyre.harness.sandbox import SandboxMissing
from gyre.harness.tasks import TasksError
from gyre.job import Job, JobError, load_recorded
from gyre.recorded import words
from gyre.recorded.export import ExportError, check_path, export
from gyre.recorded.resample import Plan, Way, resample
from gyre.recorded.rescore import Lack, Rescored, rescore
from gyre.recorded.rows import LINES, By, ExecutionLine, lines
from gyre.recorded.run import JOURNAL, Recorded, RecordedRun
from gyre.recorded.text import token_text
from gyre.trajectory.journal import JournalCorrupt, JournalError
from gyre.trajectory.reader import DamagedRow
from gyre.trajectory.tree import TreeError

BAD_ARGUMENT, DAMAGED = 2, 4

Say = Callable[[str], None]

_LACKS: dict[Lack, str] = {
    "workspace": "their workspaces were not kept (harness.keep = true keeps those of later runs)",
    "task": "their tasks' folders are not where they were",
}


class CannotShow(Exception):
    """Why, for a person, and the exit code that says it to a script."""

    def __init__(self, problem: str, exit_code: int = BAD_ARGUMENT) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


def is_run_folder(path: Path) -> bool:
    return (path / JOURNAL).is_file() or (path / "job.toml").is_file()


def find_run(folder: Path | None, runs: Path = Path("runs")) -> Path:
    """By default the run of `runs` that was written to last. Raises CannotShow."""
    if folder is not None:
        if not folder.is_dir():
            raise CannotShow(f"{folder}: there is no such run folder")
        return folder
    journals = sorted(runs.glob(f"*/{JOURNAL}"), key=lambda path: path.stat().st_mtime_ns)
    if not journals:
        raise CannotShow(f"there is no run in the folder {runs} here: name a run's folder")
    return journals[-1].parent


class Shown:
    """A run that is shown: `say` gets the lines of the answer, `warn` what somebody should know besides."""

    def __init__(self, run: RecordedRun, say: Say, warn: Say, as_json: bool) -> None:
        self._run = run
        self._say = say
        self._warn = warn
        self._json = as_json
        self._damaged = 0

    def executions(self, group: str | None) -> None:
        if not self._json:
            self._say(f"{self._run.folder}: {self._run.state}")
            self._say(words.execution_head())
        count = 0
        for line in lines(self._run, "execution", None, self._tell_damaged, group):
            assert isinstance(line, ExecutionLine)
            self._say(_json(line) if self._json else words.execution_row(line))
            count += 1
        if group is not None and not count and not self._damaged:
            raise CannotShow(f"{self._run.folder}: no execution is of a group {group}")

    def tree(self, execution: str) -> None:
        found = self._found(execution)
        if not self._json:
            for line in words.tree_lines(found):
                self._say(line)
            return
        fates = found.fates()
        for node in found.tree.nodes:
            fate = fates.get(node.call)
            fields = {
                "node": node.index,
                "call": node.call,
                "parent": node.parent,
                "role": found.roles.of_node[node.index],
                "asked_for_by": found.roles.spawns.get(node.index),
                "goes_on_from": found.roles.summaries.get(node.index),
                "tokens": len(node.tokens.token_ids),
                "sampled_tokens": node.sampled_tokens,
                "versions": sorted(set(node.tokens.versions[node.tokens.sampled].tolist())),
                "draw": fate.draw if fate else None,
                "reason": fate.reason if fate else None,
                "messages": node.messages,
                "output_message": node.output_message,
            }
            self._say(_json(fields))

    def tokens(self, name: str) -> None:
        execution, slash, of_node = name.partition("/")
        if not slash:
            raise CannotShow(
                f"{name}: a call is named EXECUTION/NUMBER, as g000012.03/7 (--tree has the numbers)"
            )
        found = self._found(execution)
        node = found.node(of_node)
        if node is None:
            last = len(found.tree.nodes) - 1
            what = f"its calls are 0 to {last}" if last >= 0 else "it has no calls"
            raise CannotShow(f"{execution} has no call {of_node}: {what}")
        text = token_text(self._run.folder, self._run.job)
        if text is None:
            self._warn(
                "no tokenizer is left, neither in a checkpoint nor where the job had its model: no text"
            )
        if not self._json:
            self._say(words.TOKEN_HEAD)
        for fields in words.token_fields(found, node, text):
            self._say(_json(fields) if self._json else words.token_row(fields))

    def export(self, path: Path, by: By, group: str | None) -> None:
        check_path(path)
        text = token_text(self._run.folder, self._run.job) if by == "span" else None
        count = export(path, LINES[by], lines(self._run, by, text, self._tell_damaged, group))
        self._say(f"{path}: {count} rows, one for each {by}")

    def resample(self, overrides: Sequence[str], group: str | None) -> None:
        was, would_be = ways(self._run.folder, overrides)
        if not self._json:
            self._say(words.resampled_head())
        before, after, count = Plan(), Plan(), 0
        for one in resample(self._run, was, would_be, self._tell, group):
            self._say(_json(one) if self._json else words.resampled_row(one))
            before, after, count = before + one.was, after + one.would_be, count + 1
        if not count and not self._damaged:
            which = "no training group" if group is None else f"no training group {group}"
            raise CannotShow(f"{self._run.folder}: {which} is complete")
        if not self._json:
            for line in words.resampled_total(before, after):
                self._say(line)

    def rescore(self, overrides: Sequence[str], concurrent: int, group: str | None) -> None:
        job = overridden(self._run.folder, overrides, "evaluator.")
        # What is printed is the answer, not what the evaluator has to say on its way to it.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        asyncio.run(self._rescore(job, concurrent, group))

    async def _rescore(self, job: Job, concurrent: int, group: str | None) -> None:
        if not self._json:
            self._say(words.rescored_head())
        lacking: Counter[Lack] = Counter()
        changed = count = failed = 0

        def tell(one: Rescored) -> None:
            nonlocal changed, count, failed
            self._say(_json(one) if self._json else words.rescored_row(one))
            count += 1
            changed += one.score != one.was
            failed += one.score is None

        await rescore(self._run, job, concurrent, group, lacking, tell)
        for lack, executions in lacking.items():
            them = "1 execution" if executions == 1 else f"{executions} executions"
            self._warn(f"{them} cannot be scored: {_LACKS[lack]}")
        if not self._json:
            self._say(f"{count} scored, {changed} of them otherwise than before, {failed} evaluations failed")
        if lacking and not count:
            raise CannotShow(f"{self._run.folder}: no execution can be scored again")

    def done(self) -> None:
        """Raises CannotShow where something could not be read."""
        if self._damaged:
            what = "one entry" if self._damaged == 1 else f"{self._damaged} entries"
            raise CannotShow(f"{self._run.folder}: {what} of the journal cannot be read", DAMAGED)

    def _found(self, name: str) -> Recorded:
        try:
            row = self._run.reader.execution(name)
            if row is None:
                some = itertools.islice(self._run.reader.scan(), 3)
                there = ", ".join(row.execution for row in some)
                raise CannotShow(f"{self._run.folder}: no execution {name}: there are {there or 'none'} ...")
            return self._run.recorded(row)
        except (JournalCorrupt, TreeError) as error:
            raise CannotShow(str(error), DAMAGED) from error

    def _tell_damaged(self, row: DamagedRow) -> None:
        self._tell(row.execution, row.reason)

    def _tell(self, what: str, reason: str) -> None:
        self._damaged += 1
        self._warn(f"{what}: cannot be read: {' '.join(reason.split())}")


@contextmanager
def shown(folder: Path | None, say: Say, warn: Say, *, as_json: bool) -> Iterator[Shown]:
    """Raises CannotShow."""
    try:
        with RecordedRun(find_run(folder)) as run:
            for note in run.notes:
                warn(f"{run.folder}: {note}")
            answer = Shown(run, say, warn, as_json)
            yield answer
            answer.done()
    except (ExportError, SandboxMissing, TasksError) as error:
        raise CannotShow(str(error)) from error
    except JournalError as error:
        raise CannotShow(
            str(error), DAMAGED if isinstance(error, JournalCorrupt) else BAD_ARGUMENT
        ) from error


def ways(folder: Path, overrides: Sequence[str]) -> tuple[Way, Way]:
    """As the run's job says, and with the overrides. Raises CannotShow."""
    was, would_be = (
        Way(
            sampling=job.sampling,
            micro_step_tokens=job.train.micro_step_tokens,
            ranks=job.cells.ranks,
        )
        for job in (
            overridden(folder, given, "sampling.", "train.micro_step_tokens") for given in ((), overrides)
        )
    )
    return was, would_be


def overridden(folder: Path, overrides: Sequence[str], *allowed: str) -> Job:
    """The run's job with overrides of keys (or, with a dot at the end, tables) that make a difference. Raises
    CannotShow."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(key == one or (one.endswith(".") and key.startswith(one)) for one in allowed):
            these = " and ".join(f"{one}*" if one.endswith(".") else one for one in allowed)
            raise CannotShow(f"--set {key}: it would change nothing here; allowed: {these}")
    try:
        return load_recorded(folder / "job.toml", overrides)
    except JobError as error:
        raise CannotShow(str(error)) from error


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
