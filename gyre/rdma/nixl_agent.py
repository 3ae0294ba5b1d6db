"""NIXL's agent, and the one thread that may touch it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# NIXL tells of no completion: while there is something to wait for its thread looks so often, and then rests
# as briefly as the system's timer lets it.
LOOKS = 16
REST_S = 20e-6
# Of a transfer that was given up and does not end: its peer stands still.
GIVEN_UP_S = 30.0


class _Move:
    """A transfer. `begin` makes its handle."""

    def __init__(self, begin: Callable[[Any], Any], done: asyncio.Future[None]) -> None:
        self.begin = begin
        self.done = done
        self.handle: Any = None
        self.error: OSError | None = None
        self.until_s = float("inf")


class Agent:
    """`make` makes the agent, in the thread; `ready` when it has, or why not."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._make = make
        self._work = threading.Condition()
        self._calls: deque[Callable[[Any], None]] = deque()
        self._moves: list[_Move] = []
        # Others are at memory of ours, and UCX may need this process to get on.
        self._visitors = 0
        self._stopping = False
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="gyre-rdma-nixl")
        self._thread.start()

    def call(self, function: Callable[[Any], T]) -> asyncio.Future[T]:
        """Its result, with the agent."""
        done: asyncio.Future[T] = self._loop.create_future()

        def run(agent: Any) -> None:
            try:
                result = function(agent)
            except Exception as error:
                self._end(done, error)
            else:
                self._loop.call_soon_threadsafe(_result, done, result)

        self._put(run)
        return done

    def move(self, begin: Callable[[Any], Any]) -> asyncio.Future[None]:
        """Until the transfer whose handle `begin` makes is over; OSError where it fails."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._put(lambda _: self._moves.append(_Move(begin, done)))
        return done

    def give_up(self, work: asyncio.Future[None]) -> None:
        """Nobody waits for that transfer any more. It goes on: NIXL has been seen to crash in the next one
        where this one was released before its end."""

        def mark(_: Any) -> None:
            for move in self._moves:
                if move.done is work:
                    move.until_s = time.monotonic() + GIVEN_UP_S

        self._put(mark)

    def visit(self, more: int) -> None:
        with self._work:
            self._visitors += more
            self._work.notify()

    async def stop(self) -> None:
        """Nothing is to be moved any more."""
        with self._work:
            self._stopping = True
            self._work.notify()
        await self._ended

    # --- in the thread ----------------------------------------------------------------------------

    def _put(self, call: Callable[[Any], None]) -> None:
        with self._work:
            self._calls.append(call)
            self._work.notify()

    def _run(self) -> None:
        try:
            agent = self._make()
        except Exception as error:
            self._end(self.ready, error)
        else:
            self._end(self.ready, None)
            self._drive(agent)
            del agent
        self._end(self._ended, None)

    def _drive(self, agent: Any) -> None:
        looks = 0
        while True:
            with self._work:
                while not (self._calls or self._moves or self._visitors or self._stopping):
                    self._work.wait()
                calls, self._calls = self._calls, deque()
                if self._stopping and not calls and not self._moves:
                    return
            for call in calls:
                call(agent)
            self._moves = [move for move in self._moves if not self._over(agent, move)]
            if self._visitors:
                agent.update_notifs()
            looks += 1
            if looks % LOOKS == 0:
                time.sleep(REST_S)

    def _over(self, agent: Any, move: _Move) -> bool:
        if move.error is not None:
            return self._released(agent, move)
        try:
            if move.handle is None:
                move.handle = move.begin(agent)
                state = agent.transfer(move.handle)
            else:
                state = agent.check_xfer_state(move.handle)
        except Exception as error:
            move.error = OSError(f"NIXL: {error}")
            return self._released(agent, move)
        if state == "PROC":
            if time.monotonic() < move.until_s:
                return False
            move.error = OSError("NIXL: it was given up")
        elif state != "DONE":
            move.error = OSError("NIXL: the transfer failed")
        return self._released(agent, move)

    def _released(self, agent: Any, move: _Move) -> bool:
        """False where NIXL still holds on to it."""
        try:
            if move.handle is not None:
                agent.release_xfer_handle(move.handle)
        except Exception as error:
            move.error = move.error or OSError(f"NIXL: {error}")
            return False
        self._end(move.done, move.error)
        return True

    def _end(self, done: asyncio.Future[Any], error: Exception | None) -> None:
        if error is None:
            self._loop.call_soon_threadsafe(_result, done, None)
        else:
            self._loop.call_soon_threadsafe(_failure, done, error)


def _result(done: asyncio.Future[T], result: T) -> None:
    if not done.done():
        done.set_result(result)


def _failure(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
