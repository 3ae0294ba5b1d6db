"""Nodes within one process."""

from __future__ import annotations

import asyncio

from gyre.actors.errors import BadMessage, LinkLost
from gyre.actors.transport.base import CLOSED, Accept, Receiver

_listeners: dict[str, MemoryListener] = {}


class MemoryChannel:
    """One end of a pair; a frame arrives at the other end on the loop's next turn."""

    receiver: Receiver
    far = False
    single = True

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.limit_bytes = 4096
        self._other: MemoryChannel | None = None
        self._lost = False

    @property
    def writable(self) -> bool:
        return True

    def send(self, payload: bytes) -> None:
        if self._other is not None:
            self._loop.call_soon(self._other._arrive, payload)

    async def drain(self) -> None:
        return

    def close(self, why: str = CLOSED) -> None:
        other, self._other = self._other, None
        if other is not None:
            self._loop.call_soon(other._end, why)
            self._loop.call_soon(self._end, why)

    def abort(self) -> None:
        self.close()

    def join(self, other: MemoryChannel) -> None:
        self._other, other._other = other, self

    def _arrive(self, payload: bytes) -> None:
        if self._other is None:
            return
        try:
            if len(payload) > self.limit_bytes:
                raise LinkLost(f"a frame of {len(payload)} bytes, {self.limit_bytes} allowed")
            self.receiver.received(memoryview(payload))
        except (BadMessage, LinkLost) as error:
            self.close(str(error))

    def _end(self, why: str) -> None:
        self._other = None
        if not self._lost:
            self._lost = True
            self.receiver.lost(why)


class MemoryListener:
    """A name that nodes of this process can dial."""

    def __init__(self, name: str, accept: Accept) -> None:
        self.endpoint = f"memory:{name}"
        self.accept = accept
        self._name = name

    def close(self) -> None:
        _listeners.pop(self._name, None)


class MemoryTransport:
    """Between nodes of one process."""

    scheme = "memory"
    where = ""

    async def listen(self, name: str, accept: Accept) -> MemoryListener:
        listener = _listeners[name] = MemoryListener(name, accept)
        return listener

    async def dial(self, rest: str, receiver: Receiver) -> MemoryChannel:
        listener = _listeners.get(rest)
        if listener is None:
            raise LinkLost("nobody listens")
        mine, theirs = MemoryChannel(), MemoryChannel()
        mine.join(theirs)
        mine.receiver = receiver
        theirs.receiver = listener.accept(theirs)
        return mine

    async def close(self) -> None:
        return
