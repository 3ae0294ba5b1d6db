"""An event loop in virtual time whose order of events follows from a seed."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stuck(Exception):
    """Nothing is ready and no timer is set, but something is waited for."""


class Host:
    """What runs on one simulated process. When it is dead, nothing of it runs any more: no callback, no
    `finally`, as after kill -9."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.context = Context()
        self.context.run(HOST.set, self)


HOST: ContextVar[Host | None] = ContextVar("gyre_sim_host", default=None)


class _Serial:
    """Hashes by order of creation: by address, the order in a set would differ from run to run."""

    serial: int

    def __hash__(self) -> int:
        return self.serial


class SimFuture(_Serial, asyncio.Future[T]):
    """A future of a SimLoop."""

    def __init__(self, serial: int, loop: SimLoop) -> None:
        self.serial = serial
        super().__init__(loop=loop)


class SimTask(_Serial, asyncio.Task[T]):
    """A task of a SimLoop; `host` is where it runs."""

    def __init__(
        self, serial: int, host: Host | None, coroutine: Any, loop: SimLoop, context: Context | None
    ) -> None:
        self.serial = serial
        self.host = host
        super().__init__(coroutine, loop=loop, name=f"task-{serial}", context=context)


class SimLoop(asyncio.BaseEventLoop):
    """Time stands still while anything is ready, then jumps to the next timer. Of the hosts that have
    something to do `rng` draws the next, which does one callback; a host's own keep their order, as in any
    loop. `after_step` is called after each, with its host. `trace` hashes all that happened: the same seed,
    the same hash, in any process."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._now = 0.0
        self._serial = 0
        self._queues: dict[Host | None, deque[asyncio.Handle]] = {}
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self.steps = 0
        self.after_step: Callable[[Host | None], None] = lambda host: None

    @property
    def trace(self) -> str:
        return self._hash.hexdigest()

    def record(self, what: str) -> None:
        """Adds to the trace."""
        self._hash.update(f"{self._now:.9f} {what}\n".encode())

    # --- what asyncio asks of a loop --------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._next_serial(), handle))
        return handle

    def create_future(self) -> SimFuture[Any]:
        return SimFuture(self._next_serial(), self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> SimTask[T]:
        host = HOST.get() if context is None else context.get(HOST)
        task: SimTask[T] = SimTask(self._next_serial(), host, coro, self, context)
        if name is not None:
            task.set_name(str(name))
        return task

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """At once: a simulation has no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return

    # --- running ----------------------------------------------------------------------------------

    def _run_once(self) -> None:
        if not self._queues:
            self._jump()
        hosts = [*self._queues]
        host = hosts[self._rng.randrange(len(hosts))] if len(hosts) > 1 else hosts[0]
        queue = self._queues[host]
        handle = queue.popleft()
        if not queue:
            del self._queues[host]
        if handle.cancelled() or (host is not None and not host.alive):
            return
        self.steps += 1
        self.record(f"{host.name if host is not None else '-'} {_name(handle)}")
        handle._run()
        self.after_step(host)

    def _jump(self) -> None:
        """To the next time at which something is due."""
        while self._timers and not self._queues:
            when, _, handle = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            self._enqueue(handle)
            while self._timers and self._timers[0][0] <= self._now:
                self._enqueue(heapq.heappop(self._timers)[2])
        if not self._queues:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise Stuck(f"at {self._now:.3f} s nothing will ever happen; waiting: {', '.join(waiting)}")

    def _enqueue(self, handle: asyncio.Handle) -> None:
        host = handle._context.get(HOST)  # type: ignore[attr-defined]
        if not handle.cancelled() and (host is None or host.alive):
            self._queues.setdefault(host, deque()).append(handle)

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial


def _name(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    while isinstance(callback, partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"task {owner.get_name()}"
    return str(getattr(callback, "__qualname__", type(callback).__name__))
