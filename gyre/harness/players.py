"""How an attempt at an execution is played: by a command in a sandbox, or by a user's actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from gyre.actors import ActorDied, ActorError, AskTimeout, AwaitChild, Ref
from gyre.harness.commands import base_environment, fill
from gyre.harness.config import HarnessConfig
from gyre.harness.custom import Halt, Play
from gyre.harness.host import FindHarness
from gyre.harness.output import Output
from gyre.harness.presets import Launch, write_files
from gyre.harness.process import GONE_TIMEOUT_S, Exit
from gyre.harness.room import with_room
from gyre.harness.sandbox import Confined, Mount, Sandbox, limits_of, run
from gyre.harness.task import Task, least
from gyre.proxy.messages import ExecutionAccess

log = structlog.get_logger()

FOREVER_S = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """`folder` holds `workspace`, `home`, `tmp` and `prompt.md`, all fresh; `mark` is for the environment of
    its processes; `model` is the policy's name; `on_start` is told a process id, where there is one."""

    execution: str
    number: int
    task: Task
    folder: Path
    mark: str
    access: ExecutionAccess
    model: str
    output: Output
    on_start: Callable[[int | None], None]


class HarnessGone(Exception):
    """There is no harness any more, because the job ends: the attempt has no outcome."""


class Player(Protocol):
    """Plays attempts, many at a time. When `play` is over, also when it was cancelled, nothing of the attempt
    runs any more."""

    async def play(self, attempt: Attempt) -> Exit:
        """Within the job's time-out. Raises HarnessGone."""


class CommandPlayer:
    """Any program."""

    def __init__(self, config: HarnessConfig, launch: Launch, sandbox: Sandbox) -> None:
        self._config = config
        self._launch = launch
        self._sandbox = sandbox

    async def play(self, attempt: Attempt) -> Exit:
        values = self._values(attempt)
        try:
            write = partial(write_files, self._launch, attempt.folder / "home", values)
            await with_room(write, attempt.execution)
        except OSError as error:
            return Exit(kind="never_started", detail=f"its files cannot be written: {error}")
        return await run(
            self._sandbox,
            self._confined(attempt, values),
            attempt.output,
            timeout_s=least(self._config.timeout_s, attempt.task.timeout_s),
            on_start=attempt.on_start,
        )

    def _values(self, attempt: Attempt) -> dict[str, str]:
        path, mounts = self._sandbox.path, _mounts(attempt)
        return {
            "workspace": path(mounts["workspace"]),
            "home": path(mounts["home"]),
            "prompt_file": path(mounts["prompt_file"]),
            "prompt": attempt.task.prompt,
            "base_url": self._sandbox.base_url(attempt.access.base_url),
            "key": attempt.access.key,
            "model": attempt.model,
            "task": attempt.task.name,
        }

    def _confined(self, attempt: Attempt, values: dict[str, str]) -> Confined:
        config, mounts = self._config, _mounts(attempt)
        return Confined(
            command=fill(self._launch.command, values),
            environment=self._environment(attempt, self._sandbox.path(mounts["tmp"]), values),
            workspace=mounts.pop("workspace"),
            mounts=(
                *mounts.values(),
                *(Mount(host=folder, inside=str(folder)) for folder in config.read_only),
                *self._launch.mounts,
            ),
            socket=attempt.access.unix_socket,
            mark=attempt.mark,
            limits=limits_of(config, attempt.task),
        )

    def _environment(self, attempt: Attempt, temporary: str, values: dict[str, str]) -> dict[str, str]:
        own = self._launch.environment
        return {
            **base_environment(values["home"], temporary),
            **attempt.task.environment,
            "OPENAI_BASE_URL": values["base_url"],
            "OPENAI_API_KEY": values["key"],
            # Its clients add /v1 themselves.
            "ANTHROPIC_BASE_URL": values["base_url"].removesuffix("/v1"),
            "ANTHROPIC_API_KEY": values["key"],
            "GYRE_PROMPT_FILE": values["prompt_file"],
            "GYRE_MODEL": attempt.model,
            "GYRE_TASK": values["task"],
            "GYRE_EXECUTION": attempt.execution,
            **dict(zip(own, fill(tuple(own.values()), values), strict=True)),
        }


def _mounts(attempt: Attempt) -> dict[str, Mount]:
    """What is an attempt's own."""
    folder = attempt.folder
    return {
        "workspace": Mount(host=folder / "workspace", inside=attempt.task.inside, writable=True),
        "home": Mount(host=folder / "home", inside="/home/agent", writable=True),
        "tmp": Mount(host=folder / "tmp", inside="/tmp", writable=True),
        "prompt_file": Mount(host=folder / "prompt.md", inside="/gyre/prompt.md"),
    }


class ActorPlayer:
    """A user's actor, which `hosts`, a Supervisor, keeps alive. When it dies all attempts at hand end as a
    killed command's does, and the next ones wait for its next life."""

    def __init__(self, config: HarnessConfig, hosts: Ref) -> None:
        self._config = config
        self._hosts = hosts
        self._dead: Ref | None = None

    async def play(self, attempt: Attempt) -> Exit:
        host, harness = await self._living()
        attempt.on_start(None)
        halted = False
        try:
            async with asyncio.timeout(least(self._config.timeout_s, attempt.task.timeout_s)):
                outcome = await harness.ask(self._message(attempt), timeout_s=FOREVER_S)
        except TimeoutError:
            return Exit(kind="timed_out")
        except ActorDied as error:
            halted = True
            self._dead = host
            return Exit(kind="killed", detail=f"its actor died: {error.reason.brief}")
        except Exception as error:  # what `play` raised
            attempt.output.feed(f"{getattr(error, 'traceback', error)}\n".encode())
            return Exit(kind="exited", code=1, detail=str(error))
        else:
            halted = True
            if outcome.text:
                attempt.output.feed(f"{outcome.text}\n".encode(errors="replace"))
            return Exit(kind="exited", code=0 if outcome.completed else 1, detail=outcome.detail)
        finally:
            if not halted:
                await self._halt(harness, attempt)

    async def _living(self) -> tuple[Ref, Ref]:
        """The host and the actor in it. Only one that cannot be had again is no more."""
        while True:
            try:
                find = AwaitChild(name="host", after=self._dead)
                host = await self._hosts.ask(find, timeout_s=FOREVER_S)
            except ActorDied as error:
                raise HarnessGone(str(error)) from error
            try:
                return host, await host.ask(FindHarness(), timeout_s=FOREVER_S)
            except ActorDied:
                self._dead = host

    def _message(self, attempt: Attempt) -> Play:
        return Play(
            execution=attempt.execution,
            attempt=attempt.number,
            task=attempt.task.name,
            prompt=attempt.task.prompt,
            workspace=attempt.folder / "workspace",
            base_url=attempt.access.base_url,
            key=attempt.access.key,
            model=attempt.model,
            timeout_s=least(self._config.timeout_s, attempt.task.timeout_s),
            max_workspace_bytes=self._config.max_workspace_bytes,
        )

    async def _halt(self, harness: Ref, attempt: Attempt) -> None:
        """What was cancelled may take its time to end, and writes to the workspace until then."""
        halt = Halt(execution=attempt.execution, attempt=attempt.number)
        try:
            await harness.ask(halt, timeout_s=GONE_TIMEOUT_S)
        except AskTimeout:
            log.error("play_not_over", execution=attempt.execution, waited_s=GONE_TIMEOUT_S)
        except ActorError as error:
            log.info("play_over", execution=attempt.execution, reason=str(error))
