"""`gyre inspect`: finds a living job, looks into it, prints what is seen."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import structlog
from rich.console import Console

from gyre.actors import ActorDied, ActorError, AskTimeout, Node, Ref
from gyre.actors.looking import (
    CONTACT,
    ActorReport,
    Contact,
    ContactError,
    Inspect,
    NoSuchActor,
    Trace,
    Traced,
    read_contact,
)
from gyre.watch.inspection import plain, trace_fields, trace_line, tree, with_rates

BAD_ARGUMENT, NO_JOB, UNUSABLE, UNANSWERED = 2, 3, 4, 5


class CannotInspect(Exception):
    """Why, for a person, and the exit code that says it to a script."""

    def __init__(self, problem: str, exit_code: int) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


def find_contact(run: Path | None, runs: Path = Path("runs")) -> tuple[Path, Contact]:
    """Of the run folder `run` (or a contact file of its own), by default that of the job of `runs` that was
    started last. Raises CannotInspect."""
    if run is None:
        path = _newest(runs)
    elif not run.exists():
        raise CannotInspect(f"{run}: there is no such run folder", BAD_ARGUMENT)
    else:
        path = run / CONTACT if run.is_dir() else run
    try:
        return path, read_contact(path)
    except ContactError as error:
        if error.absent:
            raise CannotInspect(f"{path.parent}: no job runs there (it has no {CONTACT})", NO_JOB) from error
        raise CannotInspect(str(error), UNUSABLE) from error


def _newest(runs: Path) -> Path:
    if not runs.is_dir():
        raise CannotInspect(f"there is no folder {runs} here: name the job's folder with --run", BAD_ARGUMENT)
    found = sorted(runs.glob(f"*/{CONTACT}"), key=lambda path: path.lstat().st_mtime_ns)
    if not found:
        raise CannotInspect(f"no job of {runs} runs: name another's folder with --run", NO_JOB)
    return next((path for path in reversed(found) if _may_live(path)), found[-1])


def _may_live(path: Path) -> bool:
    try:
        return not read_contact(path).is_gone
    except ContactError:
        return False


class Looker:
    """`async with Looker(path, contact, timeout_s) as looker`: a peer of that job's root."""

    def __init__(self, path: Path, contact: Contact, timeout_s: float) -> None:
        self._path = path
        self._contact = contact
        self._timeout_s = timeout_s
        self._node = Node("inspect", token=contact.token)

    async def __aenter__(self) -> Looker:
        await self._node.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._node.__aexit__(None, None, None)

    @property
    def _root(self) -> Ref:
        contact = self._contact
        return self._node.desk(self._node.bind(contact.node_id, contact.endpoint, 0, contact.name, 1))

    async def look(self, path: str) -> ActorReport:
        """Raises CannotInspect."""
        try:
            message = Inspect(path=path, within_s=self._timeout_s * 0.9)
            return await self._root.ask(message, timeout_s=self._timeout_s)
        except ActorError as error:
            raise self._why(error) from error

    async def rates(self, path: str, over_s: float) -> ActorReport:
        """As `look`, with the rates of that time."""
        loop = asyncio.get_running_loop()
        before, began = await self.look(path), loop.time()
        if over_s <= 0:
            return before
        await asyncio.sleep(over_s)
        after = await self.look(path)
        return with_rates(after, before, loop.time() - began)

    async def trace(self, path: str, seconds: float, tell: Callable[[Traced], None]) -> None:
        """What is handled in that time. Raises CannotInspect."""
        await self.look(path)  # whether there is such an actor, and whether anybody answers
        try:
            async with asyncio.timeout(seconds), aclosing(self._root.stream(Trace(path=path))) as items:
                async for one in items:
                    tell(one)
        except ActorDied as error:
            raise CannotInspect(f"{self._path.parent}: the job has ended", NO_JOB) from error
        except ActorError as error:
            raise self._why(error) from error
        except TimeoutError:
            return

    def _why(self, error: ActorError) -> CannotInspect:
        if isinstance(error, NoSuchActor):
            return CannotInspect(str(error), BAD_ARGUMENT)
        job, pid = self._path.parent, self._contact.pid
        if isinstance(error, AskTimeout):
            problem = f"the job (process {pid}) has not answered within {self._timeout_s:g} s"
            return CannotInspect(f"{job}: {problem}", UNANSWERED)
        if self._contact.is_gone:
            problem = f"the job is dead: process {pid} is gone, {self._path.name} is what it left behind"
            return CannotInspect(f"{job}: {problem}", NO_JOB)
        why = error.reason.brief if isinstance(error, ActorDied) else str(error)
        where = f" from here, it runs on {self._contact.host}" if self._elsewhere else ""
        return CannotInspect(f"{job}: the job cannot be reached{where}: {why}", UNUSABLE)

    @property
    def _elsewhere(self) -> bool:
        return self._contact.host != socket.gethostname()


async def show_report(
    run: Path | None, path: str, *, over_s: float, timeout_s: float, as_json: bool, say: Callable[[str], None]
) -> None:
    """Raises CannotInspect."""
    quiet()
    where, contact = await asyncio.to_thread(find_contact, run)
    async with Looker(where, contact, timeout_s) as looker:
        report = await looker.rates(path.strip("/"), over_s)
    console = Console(highlight=False)
    if as_json:
        say(msgspec.json.encode(report).decode())
    elif console.is_terminal:
        console.print(tree(report))
    else:
        for line in plain(report):
            say(line)


async def show_trace(
    run: Path | None,
    path: str,
    *,
    seconds: float,
    timeout_s: float,
    as_json: bool,
    say: Callable[[str], None],
) -> None:
    """Raises CannotInspect."""
    quiet()
    where, contact = await asyncio.to_thread(find_contact, run)

    def tell(one: Traced) -> None:
        say(msgspec.json.encode(trace_fields(one)).decode() if as_json else trace_line(one))

    async with Looker(where, contact, timeout_s) as looker:
        await looker.trace(path.strip("/"), seconds, tell)


def quiet() -> None:
    """What is printed is the answer, not what this process' own node has to say."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
