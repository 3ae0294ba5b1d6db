"""What a harness is that a user writes as an actor, instead of a command: the messages and a base class."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

import msgspec

from gyre.actors import Actor, Ask, handles


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a harness says that it is done with an execution; the workspace it leaves is scored either way.
    With `completed` false it counts as a command that exited with an error. `text` goes to harness.log."""

    completed: bool = True
    detail: str = ""
    text: str = ""


class Play(Ask[Outcome], frozen=True, kw_only=True):
    """One attempt at an execution. The policy answers OpenAI Chat Completions at `base_url` (which ends in
    `/v1`) for `key`, by the name `model`, until the attempt is over. `workspace` is this attempt's own, and
    one larger than `max_workspace_bytes` scores 0. After `timeout_s` it is cancelled."""

    execution: str
    attempt: int
    task: str
    prompt: str
    workspace: Path
    base_url: str
    key: str
    model: str
    timeout_s: float
    max_workspace_bytes: int


class Halt(Ask[None], frozen=True, kw_only=True):
    """Ends an attempt; answered when nothing of it runs any more."""

    execution: str
    attempt: int


class Harness(Actor):
    """Base of `[harness] actor`: write `play`. The constructor takes nothing, or one argument annotated with
    a msgspec Struct, to which `[harness.options]` are decoded. Many executions are played at once, each in a
    task of its own, so `play` must not block; an actor that must is given `own_process = true`."""

    _playing: dict[tuple[str, int], asyncio.Task[Any]]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        # A subclass' `__init__` need not know of it.
        self = super().__new__(cls)
        self._playing = {}
        return self

    async def play(self, play: Play) -> Outcome:
        """Plays one attempt to its end. What it raises ends the attempt as an exit with an error does.
        Cancelled when time is over or the job stops: what it started must not outlive it."""
        raise NotImplementedError

    @handles(Play, concurrent=True)
    async def handle_play(self, message: Play) -> Outcome:
        task = asyncio.current_task()
        assert task is not None
        key = (message.execution, message.attempt)
        self._playing[key] = task
        try:
            return await self.play(message)
        finally:
            del self._playing[key]

    @handles(Halt, concurrent=True)
    async def handle_halt(self, message: Halt) -> None:
        task = self._playing.get((message.execution, message.attempt))
        if task is not None:
            if not task.cancelling():  # a second time would cut short what it still has to do
                task.cancel()
            await asyncio.wait([task])
