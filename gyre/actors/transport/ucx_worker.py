"""UCX's engine, driven by the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from gyre.actors.transport.base import TransportUnusable

# Passes over all connections before the loop gets its turn again.
PASSES = 16
# How long a peer may take to agree to an end that is no orderly one.
PART_TIMEOUT_S = 2.0
INSTALL = "pip install 'gyre[ucx]'"

_pid = 0


class Polled(Protocol):
    """Has UCX work for it."""

    def flush(self) -> None:
        """Hands UCX what is to be sent."""

    def poll(self) -> None:
        """Looks at what UCX has done."""

    def close(self) -> None:
        """Is to be forgotten soon."""


class UcxWorker:
    """Is progressed when UCX's file descriptor has something to say or something is to be sent, and never
    polled: an idle one costs nothing. It has no thread and no task of its own, so it does not mind which loop
    it is on. UCX calls back from within its progress, where nothing may be closed: what it says is noted
    and handled after."""

    def __init__(self, devices: str = "", *, tags: bool = False) -> None:
        """`devices`: the only networks that UCX may use, unless the environment names some. `tags`: for
        messages by tag, not for streams. TransportUnusable where UCX is not installed, or does not start."""
        self.api = _load()
        config = {"NET_DEVICES": devices} if devices and "UCX_NET_DEVICES" not in os.environ else {}
        feature = self.api.Feature
        kind = feature.TAG if tags else feature.STREAM
        try:
            self._context = self.api.UCXContext(config, feature_flags=(kind, feature.WAKEUP))
            self._worker: Any = self.api.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except self.api.UCXError as error:
            fix = "see UCX_TLS and UCX_NET_DEVICES in the environment"
            raise TransportUnusable("ucx", f"UCX does not start: {error}", fix) from error
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Future[None] | None = None
        self._polled: dict[Polled, None] = {}
        self._written: dict[Polled, None] = {}
        self._calls: deque[tuple[Any, Callable[[Any], None]]] = deque()
        self._listeners: list[Any] = []
        self._parting: list[tuple[Any, Any]] = []
        self._due = False

    def connect(self, address: str, port: int) -> Any:
        """An endpoint to be. UCXError."""
        self._start()
        return self.api.UCXEndpoint.create(self._worker, address, port, True)

    def address(self) -> bytes:
        """By which another worker reaches this one, without a listener."""
        self._start()
        return bytes(self.api.UCXAddress.create_from_worker(self._worker).tobytes())

    def reach(self, address: bytes) -> Any:
        """An endpoint to a worker. UCXError, ValueError."""
        self._start()
        there = self.api.UCXAddress.create_from_buffer(bytearray(address))
        return self.api.UCXEndpoint.create_from_worker_address(self._worker, there, True)

    def listen(self, called: Callable[[Any], None]) -> int:
        """At any port, which it returns, of any address: ucxx offers no other. `called` gets endpoints, until
        `close`. UCXError."""
        self._start()
        listener = self.api.UCXListener.create(self._worker, 0, self._note, (called,), deliver_endpoint=True)
        # Endpoints made by it keep UCX's listener alive, which would call a Python one that is gone.
        self._listeners.append(listener)
        return int(listener.port)

    def part(self, endpoint: Any, *, idle: bool) -> None:
        """Ends a connection. UCX may not be within its progress."""
        if idle:
            endpoint.close_blocking()
        elif endpoint.alive:
            # The blocking one would cancel what is under way, and ucxx never lets go of what that leaves.
            self._parting.append((endpoint, endpoint.close()))

    def add(self, polled: Polled) -> None:
        self._polled[polled] = None
        self.soon()

    def forget(self, polled: Polled) -> None:
        """Closing its endpoint may have made progress with others."""
        self._polled.pop(polled, None)
        self._written.pop(polled, None)
        self.soon()

    def written(self, polled: Polled) -> None:
        """It has something to flush."""
        self._written[polled] = None
        self.soon()

    def soon(self) -> None:
        """Progress on the next turn."""
        if not self._due and self._loop is not None:
            self._due = True
            self._loop.call_soon(self._progress)

    async def close(self) -> None:
        """Returns when all are forgotten and UCX is stopped. Of a silent peer it keeps what it has."""
        if self._loop is not None:
            for polled in self._polled:
                polled.close()
            while self._polled:
                await self._change()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PART_TIMEOUT_S):
                    while self._parting:
                        await self._change()
            self._worker.progress()  # the last of those that parted learn it
            self._loop.remove_reader(self._worker.epoll_file_descriptor)
        self._listeners.clear()
        self._loop = self._worker = self._context = None

    async def _change(self) -> None:
        """Until there was progress."""
        assert self._loop is not None
        self._changed = self._changed or self._loop.create_future()
        await asyncio.shield(self._changed)

    def _start(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._worker.epoll_file_descriptor, self._progress)

    def _note(self, endpoint: Any, called: Callable[[Any], None]) -> None:
        self._calls.append((endpoint, called))

    def _progress(self) -> None:
        self._due = False
        for _ in range(PASSES):
            if self._worker is None:
                return
            written, self._written = self._written, {}
            for polled in written:
                polled.flush()
            self._worker.progress()
            while self._calls:
                endpoint, called = self._calls.popleft()
                called(endpoint)
            for polled in [*self._polled]:
                polled.poll()
            self._parting = [pair for pair in self._parting if not pair[1].completed]
            if self._changed is not None:
                self._changed.set_result(None)
                self._changed = None
            # Armed, the descriptor tells of whatever comes; it cannot be while something is under way.
            if self._due or self._worker.arm():
                return
        self.soon()


def _load() -> ModuleType:
    global _pid
    if _pid not in (0, os.getpid()):
        why = "this process was forked from one that uses it, and UCX's own thread is not in it"
        raise TransportUnusable("ucx", why, "start processes by a ProcessSpec, or spawn them")
    # ucxx itself sets variables that UCX then complains of; what fails is told by us, once.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCXX_LOG_LEVEL", "FATAL")
    try:
        from ucxx import libucxx
    except ImportError as error:
        raise TransportUnusable("ucx", f"ucxx cannot be imported: {error}", INSTALL) from error
    _pid = os.getpid()
    return libucxx  # type: ignore[no-any-return]
