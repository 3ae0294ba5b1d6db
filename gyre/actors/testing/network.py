"""A simulated network: frames with latency, partitions, peers that vanish, frames that come twice."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass

from gyre.actors.errors import BadMessage, LinkLost
from gyre.actors.testing.loop import HOST, Host, SimLoop
from gyre.actors.transport import CLOSED, Accept, Receiver

DIAL_TIMEOUT_S = 5.0
# Frames that may wait to be read by the other end before a writer is told to stop.
BUFFER_FRAMES = 64


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How the network is. Latency is drawn for each frame between these bounds, but frames of one direction
    of a connection arrive in order; those of different peers overtake each other. One host in
    `slow_readers` takes `slow_s` for each frame. A connection made after an earlier one of the same pair
    begins with that one's last frame with probability `duplicates`."""

    latency_s: tuple[float, float] = (0.0001, 0.005)
    slow_readers: float = 0.0
    slow_s: float = 0.02
    duplicates: float = 0.0


class SimNetwork:
    """All connections between hosts. Drives no traffic of its own."""

    def __init__(self, loop: SimLoop, rng: random.Random, weather: Weather) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = weather
        self.listeners: dict[str, SimListener] = {}
        self.last: dict[tuple[Host, Host], bytes] = {}
        self._channels: dict[SimChannel, None] = {}
        self._cut: dict[frozenset[Host], None] = {}
        self._slow: dict[Host, float] = {}

    # --- faults -----------------------------------------------------------------------------------

    def partition(self, a: Host, b: Host) -> None:
        """From now on nothing passes between the two; what is under way waits."""
        self._cut[frozenset((a, b))] = None

    def heal(self, a: Host, b: Host) -> None:
        """What waited arrives."""
        self._cut.pop(frozenset((a, b)), None)
        for channel in [*self._channels]:
            if {channel.host, channel.other_host} == {a, b}:
                channel.flush()

    def break_connections(self, host: Host) -> None:
        """All connections of a host are reset; both ends learn it."""
        for channel in [*self._channels]:
            if channel.host is host:
                channel.close("connection reset")

    def vanish(self, host: Host) -> None:
        """The host is dead, and its peers hear nothing of it: as when a machine loses power."""
        for channel in [*self._channels]:
            if channel.host is host:
                del self._channels[channel]
        self._slow.pop(host, None)
        for pair in [pair for pair in self.last if host in pair]:
            del self.last[pair]
        for endpoint, listener in [*self.listeners.items()]:
            if listener.host is host:
                del self.listeners[endpoint]

    def exit(self, host: Host) -> None:
        """The host is dead; the kernel closes its connections."""
        for channel in [*self._channels]:
            if channel.host is host:
                channel.close()
        self.vanish(host)

    def is_cut(self, a: Host, b: Host) -> bool:
        return frozenset((a, b)) in self._cut

    # --- for its transports and channels ------------------------------------------------------------

    def latency_s(self) -> float:
        return self.rng.uniform(*self.weather.latency_s)

    def reading_s(self, host: Host) -> float:
        """How long a host takes to read a frame."""
        if host not in self._slow:
            slow = self.rng.random() < self.weather.slow_readers
            self._slow[host] = self.weather.slow_s if slow else 0.0
        return self._slow[host]

    def connect(self, host: Host, receiver: Receiver, listener: SimListener) -> SimChannel:
        mine, theirs = SimChannel(self, host), SimChannel(self, listener.host)
        mine.other, theirs.other = theirs, mine
        mine.other_host, theirs.other_host = listener.host, host
        self._channels[mine] = self._channels[theirs] = None
        mine.receiver = receiver
        theirs.receiver = listener.host.context.copy().run(listener.accept, theirs)
        return mine

    def forget(self, channel: SimChannel) -> None:
        self._channels.pop(channel, None)

    def open_connections(self, host: Host) -> int:
        return sum(channel.host is host for channel in self._channels)


class SimChannel:
    """One end of a connection."""

    receiver: Receiver
    other: SimChannel
    other_host: Host
    far = True
    single = True

    def __init__(self, network: SimNetwork, host: Host) -> None:
        self.host = host
        self.limit_bytes = 4096
        self._network = network
        self._loop = network.loop
        self._held: deque[bytes] = deque()
        self._last_s = 0.0
        self._unread = 0
        self._room: asyncio.Future[None] | None = None
        self._closed = False
        self._lost = False
        self._first = True

    @property
    def writable(self) -> bool:
        return self._room is None

    def send(self, payload: bytes) -> None:
        if self._closed:
            return
        network, pair = self._network, (self.host, self.other_host)
        if self._first:
            self._first = False
            again = network.last.get(pair)
            if again is not None and network.rng.random() < network.weather.duplicates:
                self._held.append(again)
        network.last[pair] = payload
        self._held.append(payload)
        self._unread += 1
        if self._unread >= BUFFER_FRAMES and self._room is None:
            self._room = self._loop.create_future()
        self.flush()

    async def drain(self) -> None:
        while self._room is not None:
            await asyncio.shield(self._room)

    def close(self, why: str = CLOSED) -> None:
        """What was sent before arrives before."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon(self._end, why, context=self.host.context)
        if not self._network.is_cut(self.host, self.other_host):
            self._loop.call_at(self._due(), self.other._end, why, context=self.other_host.context)

    def abort(self) -> None:
        self.close()

    def flush(self) -> None:
        """Sends off what is held, unless the way is cut."""
        if self._network.is_cut(self.host, self.other_host):
            return
        while self._held:
            payload = self._held.popleft()
            self._loop.call_at(self._due(), self.other._arrive, payload, context=self.other_host.context)

    def _due(self) -> float:
        """When what is sent now arrives: never before what was sent before."""
        network = self._network
        arrives = max(self._last_s, self._loop.time() + network.latency_s())
        self._last_s = arrives + network.reading_s(self.other_host)
        return self._last_s

    def _arrive(self, payload: bytes) -> None:
        self.other._read()
        if self._closed:
            return
        self._loop.record(f"frame {self.other_host.name}>{self.host.name} {payload.hex()}")
        try:
            if len(payload) > self.limit_bytes:
                raise LinkLost(f"a frame of {len(payload)} bytes, {self.limit_bytes} allowed")
            self.receiver.received(memoryview(payload))
        except (BadMessage, LinkLost) as error:
            self.close(str(error))

    def _read(self) -> None:
        """The other end has taken a frame."""
        self._unread -= 1
        if self._unread < BUFFER_FRAMES // 2:
            self._give_room()

    def _give_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set_result(None)

    def _end(self, why: str) -> None:
        self._closed = True
        self._network.forget(self)
        self._give_room()
        if not self._lost:
            self._lost = True
            self.receiver.lost(why)


class SimListener:
    """Where peers call."""

    def __init__(self, network: SimNetwork, host: Host, name: str, accept: Accept) -> None:
        self.endpoint = f"sim:{name}"
        self.host = host
        self.accept = accept
        self._network = network

    def close(self) -> None:
        self._network.listeners.pop(self.endpoint, None)


class SimTransport:
    """A host's way into the network: of `host`, or of the one that what uses it runs on."""

    scheme = "sim"

    def __init__(self, network: SimNetwork, host: Host | None = None) -> None:
        self.where = ""
        self._network = network
        self._host = host

    async def listen(self, name: str, accept: Accept) -> SimListener:
        listener = SimListener(self._network, self._here(), name, accept)
        self._network.listeners[listener.endpoint] = listener
        return listener

    async def dial(self, rest: str, receiver: Receiver) -> SimChannel:
        network, host = self._network, self._here()
        await asyncio.sleep(network.latency_s())
        listener = network.listeners.get(f"sim:{rest}")
        if listener is None:
            raise LinkLost("nobody listens")
        if network.is_cut(host, listener.host):
            await asyncio.sleep(DIAL_TIMEOUT_S)
            raise LinkLost("no answer")
        return network.connect(host, receiver, listener)

    async def close(self) -> None:
        return

    def _here(self) -> Host:
        host = self._host or HOST.get()
        assert host is not None, "a node of a simulation runs on a host"
        return host
