"""What a job's evaluators must satisfy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import urlsplit

from gyre.harness.config import JudgeConfig, PytestConfig, ScorerConfig, scorers
from gyre.harness.pytest_scorer import hidden_functions
from gyre.harness.task import Script, Suite, Task, TasksError
from gyre.harness.tasks import load_bundled, load_tasks
from gyre.job.broken import Broken, broken
from gyre.job.decode import Fault, shown
from gyre.job.named import named_faults
from gyre.job.tables import Job

WAYS = ("command", "pytest", "judge", "function", "own")


def evaluation_faults(job: Job) -> Iterator[Broken]:
    if job.evaluator.mix:
        for way in (*WAYS, "junit"):
            if getattr(job.evaluator, way):
                found, legal = f"{way} beside a mix", "in one of evaluator.mix.NAME, or no mix"
                yield broken(found, legal, f"evaluator.{way}", "evaluator.mix")
    for table, scorer in scorers(job.evaluator):
        yield from _scorer(job, table, scorer)


def evaluation_warnings(job: Job) -> Iterator[Fault]:
    for table, scorer in scorers(job.evaluator):
        for task in _known_tasks(job) if scorer.own else ():
            if isinstance(task.own, Script):
                yield Fault(
                    key=f"{table}.own",
                    found=f"{task.folder} is scored by a script",
                    allowed="hidden tests: a script runs beside what it judges and can be deceived by it",
                )
                break


def command_faults(key: str, command: tuple[str, ...], instead: str = "") -> Iterator[Broken]:
    if not command or not command[0]:
        yield broken(shown(list(command)), f"a program and its arguments{instead}", key)
    if any("\0" in word for word in command):
        yield broken(shown(list(command)), "words without NUL characters", key)


def _scorer(job: Job, table: str, scorer: ScorerConfig) -> Iterator[Broken]:
    given = [way for way in WAYS if getattr(scorer, way)]
    if len(given) > 1:
        yield broken(" and ".join(given), f"one of {', '.join(WAYS)}", *(f"{table}.{way}" for way in given))
    if not given or scorer.command:
        others = f"; or {', '.join(f'{table}.{way}' for way in WAYS[1:])}"
        mix = " or evaluator.mix" if table == "evaluator" else ""
        yield from command_faults(f"{table}.command", scorer.command, others + mix)
    if scorer.junit and not any("{report}" in word for word in scorer.command):
        yield broken(
            "no {report} in it",
            f"with {table}.junit the command writes JUnit XML to {{report}}",
            f"{table}.command",
            f"{table}.junit",
        )
    if scorer.function is not None:
        for fault in named_faults(f"{table}.function", scorer.function, "function"):
            yield frozenset([f"{table}.function"]), fault
    if scorer.own:
        yield from _own(job, table)
    if scorer.pytest is not None:
        yield from _pytest(job, f"{table}.pytest", scorer.pytest)
    if scorer.judge is not None:
        yield from _judge(f"{table}.judge", scorer.judge)


def _pytest(job: Job, table: str, config: PytestConfig) -> Iterator[Broken]:
    """Tasks that a recipe writes are looked at when it has."""
    if PathFinder.find_spec("pytest") is None:
        yield broken("there is no pytest", "pytest, installed in the environment of gyre", table)
    if (
        config.tests.is_absolute()
        or ".." in config.tests.parts
        or config.tests.parts[:1] in ((), ("workspace",))
    ):
        yield broken(shown(str(config.tests)), "a folder of the task's, beside workspace", f"{table}.tests")
        return
    for plugin in config.plugins:
        if not all(part.isidentifier() for part in plugin.split(".")):
            yield broken(shown(plugin), "a module, such as pytest_asyncio.plugin", f"{table}.plugins")
        elif PathFinder.find_spec(plugin.partition(".")[0]) is None:
            yield broken(f"there is no module {plugin}", "one that is installed", f"{table}.plugins")
    for task in _known_tasks(job):
        try:
            hidden_functions(task.folder / config.tests)
        except TasksError as error:
            yield broken(f"{error.place} {error.problem}", error.fix, f"{table}.tests")
            break


def _own(job: Job, table: str) -> Iterator[Broken]:
    for task in _known_tasks(job):
        if task.own is None:
            found = f"{task.folder} has no evaluator of its own"
            yield broken(found, "hidden tests in its folder tests", f"{table}.own")
            break
        if isinstance(task.own, Suite):
            if PathFinder.find_spec("pytest") is None:
                yield broken(
                    "there is no pytest", "pytest, installed in the environment of gyre", f"{table}.own"
                )
                break
            try:
                hidden_functions(task.folder / task.own.tests)
            except TasksError as error:
                yield broken(f"{error.place} {error.problem}", error.fix, f"{table}.own")
                break


def _known_tasks(job: Job) -> Iterator[Task]:
    """Those that are there already. What is wrong with them themselves is said of their source."""
    for source in (job.tasks, job.eval):
        with contextlib.suppress(TasksError):
            if source.path is not None:
                yield from load_tasks(source.path)
            yield from load_bundled(source.bundled)


def _judge(table: str, config: JudgeConfig) -> Iterator[Broken]:
    try:
        url = urlsplit(config.base_url)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url or "\0" in config.base_url:
        allowed = "an OpenAI-compatible endpoint, such as https://HOST/v1"
        yield broken(shown(config.base_url), allowed, f"{table}.base_url")
    if not config.model:
        yield broken(shown(""), "the name by which the endpoint knows its model", f"{table}.model")
    if not _has_text(config.rubric):
        yield broken(f"no text in {config.rubric}", "a text file that says what is judged", f"{table}.rubric")
    if config.api_key_env and not os.environ.get(config.api_key_env):
        found = f"no variable {config.api_key_env} in the environment"
        yield broken(found, "the name of one that has the endpoint's key", f"{table}.api_key_env")
    if not config.files or not all(config.files):
        yield broken(shown(list(config.files)), "patterns of file names, such as '*.py'", f"{table}.files")


def _has_text(path: Path) -> bool:
    try:
        return bool(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return False
