"""Executions on another machine: an actor there that plays attempts, in a process of its own."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from pathlib import Path

import msgspec
import structlog

from gyre.actors import Actor, ActorDied, ActorError, Ask, AskTimeout, ProcessSpec, Ref, handles
from gyre.harness.config import HarnessConfig
from gyre.harness.output import Output
from gyre.harness.own_folder import OwnFolder
from gyre.harness.places import Places
from gyre.harness.players import FOREVER_S, Attempt, CommandPlayer, Player
from gyre.harness.presets import launch_of
from gyre.harness.process import GONE_TIMEOUT_S, Exit, start_guardian
from gyre.harness.relay import Relay
from gyre.harness.sandboxes import sandboxes_by_name
from gyre.harness.tasks import Task
from gyre.proxy.messages import ExecutionAccess

log = structlog.get_logger()

SHUTDOWN_S = 20.0


class JoinHarness(Ask[None], frozen=True, kw_only=True):
    """To the HarnessActor: the machine of `node` plays up to `executions` at a time. Fails where it cannot,
    with the reason."""

    node: Ref
    executions: int


class LeaveHarness(Ask[None], frozen=True, kw_only=True):
    """To the HarnessActor: the machine goes. What it plays is played again elsewhere."""

    node: Ref


class FarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`folder` has the executions' own and must be seen there; the proxy listens at `host`:`port`."""

    harness: HarnessConfig
    window_tokens: int
    max_new_tokens: int
    folder: Path
    host: str = ""
    port: int = 0


class PlayFar(Ask[Exit], frozen=True, kw_only=True):
    """An Attempt, whose output goes to `harness.log` in its `folder`."""

    execution: str
    number: int
    task: Task
    folder: Path
    base_url: str
    key: str
    model: str


class HaltFar(Ask[None], frozen=True, kw_only=True):
    """Ends an attempt; answered when nothing of it runs any more."""

    execution: str
    number: int


class NotHere(Exception):
    """This machine cannot play executions of the job."""


class FarHarness(Actor):
    """Plays attempts on its machine. When its process ends, however, what it started is killed."""

    def __init__(self, config: FarConfig) -> None:
        self._config = config
        # Short, because paths of sockets are bounded.
        self._folder = OwnFolder()
        # In a folder that sandboxes are given.
        self._socket = self._folder.path / "proxy" / "proxy.sock"
        self._relay = Relay(self._socket, config.host, config.port)
        self._guard = f"{secrets.token_hex(8)}/"
        self._guardian: subprocess.Popen[bytes] | None = None
        self._playing: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def started(self) -> None:
        """Raises NotHere, ProgramMissing, PresetMissing, SandboxMissing."""
        try:
            await self._start()
        except BaseException:
            await self.stopping()
            raise

    async def _start(self) -> None:
        config = self._config
        if not await asyncio.to_thread(config.folder.is_dir):
            raise NotHere(f"this machine does not see {config.folder}, where executions have their folders")
        try:
            await self._relay.start()
        except OSError as error:
            where = f"{config.host}:{config.port}"
            raise NotHere(f"this machine does not reach the proxy at {where}: {error}") from error
        sandbox = sandboxes_by_name(self._folder.path / "sandbox")[config.harness.sandbox]
        await asyncio.to_thread(sandbox.check)
        launch = await asyncio.to_thread(
            launch_of, config.harness, config.window_tokens, config.max_new_tokens
        )
        self._player = CommandPlayer(config.harness, launch, sandbox)
        self._guardian = start_guardian(self._guard)

    async def stopping(self) -> None:
        await self._relay.stop()
        if self._guardian is not None:
            await asyncio.to_thread(self._guardian.communicate)
        await asyncio.to_thread(self._folder.remove)

    @handles(PlayFar, concurrent=True)
    async def play(self, message: PlayFar) -> Exit:
        task = asyncio.current_task()
        assert task is not None
        key = (message.execution, message.number)
        self._playing[key] = task
        try:
            return await self._played(message)
        finally:
            del self._playing[key]

    @handles(HaltFar, concurrent=True)
    async def halt(self, message: HaltFar) -> None:
        task = self._playing.get((message.execution, message.number))
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _played(self, message: PlayFar) -> Exit:
        try:
            output = Output(message.folder / "harness.log")
        except OSError as error:
            return Exit(kind="never_started", detail=str(error))
        access = ExecutionAccess(base_url=message.base_url, key=message.key, unix_socket=self._socket)
        attempt = Attempt(
            execution=message.execution,
            number=message.number,
            task=message.task,
            folder=message.folder,
            mark=f"{self._guard}{message.execution}/{message.number}/",
            access=access,
            model=message.model,
            output=output,
            on_start=lambda pid: None,
        )
        try:
            return await self._player.play(attempt)
        finally:
            output.close()


def far_spec(config: FarConfig, node: Ref, log_path: Path) -> ProcessSpec:
    return ProcessSpec(
        name=f"harness-{node.node_id}",
        actor=f"{FarHarness.__module__}:{FarHarness.__qualname__}",
        config=config,
        log_path=log_path,
        restart="temporary",
        shutdown_s=SHUTDOWN_S,
        node=node,
    )


class PlacingPlayer:
    """Plays where there is a place."""

    def __init__(self, places: Places, here: Player | None) -> None:
        self._places = places
        self._here = here

    async def play(self, attempt: Attempt) -> Exit:
        async with self._places.place() as where:
            if where is None:
                assert self._here is not None
                return await self._here.play(attempt)
            ended = await _play_at(where, attempt)
            if ended.kind == "lost":
                # Before the HarnessActor has heard of it: the next attempt must not come here again.
                self._places.remove(where)
            return ended


async def _play_at(machine: Ref, attempt: Attempt) -> Exit:
    attempt.on_start(None)
    message = PlayFar(
        execution=attempt.execution,
        number=attempt.number,
        task=attempt.task,
        folder=attempt.folder,
        base_url=attempt.access.base_url,
        key=attempt.access.key,
        model=attempt.model,
    )
    over = False
    try:
        ended = await machine.ask(message, timeout_s=FOREVER_S)
        over = True
        return ended
    except ActorDied as error:
        over = True
        return Exit(kind="lost", detail=f"its machine is gone: {error.reason.brief}")
    finally:
        if not over:
            await _halt(machine, attempt)


async def _halt(machine: Ref, attempt: Attempt) -> None:
    halt = HaltFar(execution=attempt.execution, number=attempt.number)
    try:
        await machine.ask(halt, timeout_s=2 * GONE_TIMEOUT_S)
    except AskTimeout:
        log.error("play_not_over", execution=attempt.execution, waited_s=2 * GONE_TIMEOUT_S)
    except ActorError as error:
        log.info("play_over", execution=attempt.execution, reason=str(error))
