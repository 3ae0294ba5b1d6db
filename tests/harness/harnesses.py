"""Harness actors that the tests put into a job."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec

from gyre.actors import Tell, handles
from gyre.harness import Harness, Outcome, Play


class Options(msgspec.Struct, frozen=True, kw_only=True):
    how: str = "well"
    tries: int = 1
    fifo: str = ""


class Crash(Tell, frozen=True, kw_only=True):
    pass


class Scripted(Harness):
    """Touches a file of the workspace, then does as it was told."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._together = 0

    async def play(self, play: Play) -> Outcome:
        (play.workspace / "one").touch()
        match self._options.how:
            case "fails":
                return Outcome(completed=False, detail="gave up")
            case "raises":
                raise LookupError("no such thing")
            case "hangs":
                await self._hang(play)
            case "dies" if play.attempt <= self._options.tries:
                await self._die()
        return Outcome(text=msgspec.json.encode(play, enc_hook=str).decode())

    async def _hang(self, play: Play) -> None:
        if self._options.fifo:
            with open(self._options.fifo, "wb") as fifo:  # noqa: ASYNC230  it has a reader
                fifo.write(b"x")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)
            (play.workspace / "two").touch()

    async def _die(self) -> None:
        """When two are at it."""
        self._together += 1
        if self._together == 2:
            await self.context.ref.tell(Crash())
        await asyncio.Event().wait()

    @handles(Crash)
    async def crash(self, _: Crash) -> None:
        if os.environ.get("HARNESS_OF_ITS_OWN"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("it broke")


class Bare(Harness):
    async def play(self, play: Play) -> Outcome:
        return Outcome()


class Two(Harness):
    def __init__(self, first: int, second: int) -> None:
        raise NotImplementedError


class NoHarness:
    pass
