"""The simulated network, below the nodes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from gyre.actors.errors import LinkLost
from gyre.actors.testing import Host, SimTransport, Simulation, Weather
from gyre.actors.transport import CLOSED, Channel


class End:
    """Keeps what it hears, and when."""

    def __init__(self, sim: Simulation) -> None:
        self.heard: list[tuple[float, bytes]] = []
        self.lost_with: list[str] = []
        self.channel: Channel
        self._loop = sim.loop

    @property
    def words(self) -> list[bytes]:
        return [word for _, word in self.heard]

    def received(self, payload: memoryview) -> None:
        self.heard.append((self._loop.time(), bytes(payload)))

    def lost(self, why: str) -> None:
        self.lost_with.append(why)


class Pair:
    """Two hosts; `dial` makes a connection between them."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.a, self.b = sim.host("a"), sim.host("b")
        self.transport = SimTransport(sim.network)
        self.accepted: list[End] = []

    async def listen(self) -> None:
        await self.sim.start(self.b, self.transport.listen("b", self._accept))

    async def dial(self) -> tuple[End, End]:
        mine = End(self.sim)
        mine.channel = await self.sim.start(self.a, self.transport.dial("b", mine))
        return mine, self.accepted[-1]

    def _accept(self, channel: Channel) -> End:
        end = End(self.sim)
        end.channel = channel
        self.accepted.append(end)
        return end


def play(scenario: Callable[[Pair], Awaitable[None]], weather: Weather | None = None, seed: int = 0) -> None:
    async def main(sim: Simulation) -> None:
        pair = Pair(sim)
        await pair.listen()
        await scenario(pair)

    Simulation(seed, weather).run(main)


def test_frames_arrive_in_order_and_take_their_time() -> None:
    async def scenario(pair: Pair) -> None:
        mine, theirs = await pair.dial()
        began = pair.sim.loop.time()
        for number in range(50):
            mine.channel.send(bytes([number]))
        await asyncio.sleep(1.0)
        assert theirs.words == [bytes([number]) for number in range(50)]
        times = [at - began for at, _ in theirs.heard]
        assert 0.01 <= times[0] <= times[-1] <= 0.02

    play(scenario, Weather(latency_s=(0.01, 0.02)))


def test_what_is_sent_before_a_close_arrives_before_it() -> None:
    async def scenario(pair: Pair) -> None:
        mine, theirs = await pair.dial()
        mine.channel.send(b"last")
        mine.channel.close()
        mine.channel.send(b"too late")
        await asyncio.sleep(1.0)
        assert theirs.words == [b"last"]
        assert theirs.lost_with == mine.lost_with == [CLOSED]

    play(scenario)


def test_what_is_sent_over_a_cut_arrives_when_it_heals() -> None:
    async def scenario(pair: Pair) -> None:
        mine, theirs = await pair.dial()
        pair.sim.network.partition(pair.a, pair.b)
        mine.channel.send(b"hello")
        await asyncio.sleep(10.0)
        assert theirs.words == []
        pair.sim.network.heal(pair.a, pair.b)
        await asyncio.sleep(1.0)
        assert theirs.words == [b"hello"]

    play(scenario)


def test_nobody_is_reached_over_a_cut() -> None:
    async def scenario(pair: Pair) -> None:
        pair.sim.network.partition(pair.a, pair.b)
        with pytest.raises(LinkLost, match="no answer"):
            await pair.dial()

    play(scenario)


def test_who_is_killed_closes_its_connections_and_who_loses_power_does_not() -> None:
    async def scenario(pair: Pair) -> None:
        mine, _ = await pair.dial()
        again, _ = await pair.dial()
        pair.sim.kill(pair.b)
        await asyncio.sleep(1.0)
        assert mine.lost_with == again.lost_with == [CLOSED]
        with pytest.raises(LinkLost, match="nobody listens"):
            await pair.dial()

    async def powerless(pair: Pair) -> None:
        mine, _ = await pair.dial()
        pair.sim.power_off(pair.b)
        mine.channel.send(b"are you there?")
        await asyncio.sleep(100.0)
        assert mine.lost_with == []

    play(scenario)
    play(powerless)


def test_a_slow_reader_makes_the_writer_wait() -> None:
    async def scenario(pair: Pair) -> None:
        mine, theirs = await pair.dial()
        while mine.channel.writable:
            mine.channel.send(b"x")
        sent = pair.sim.loop.time()
        await mine.channel.drain()
        assert pair.sim.loop.time() - sent > 0.5
        await asyncio.sleep(10.0)
        times = [at for at, _ in theirs.heard]
        assert all(later - earlier >= 0.0199 for earlier, later in itertools.pairwise(times))

    play(scenario, Weather(slow_readers=1.0, slow_s=0.02))


def test_a_new_connection_may_begin_with_the_last_frame_of_the_old() -> None:
    async def scenario(pair: Pair) -> None:
        mine, _ = await pair.dial()
        mine.channel.send(b"old")
        mine.channel.close()
        await asyncio.sleep(1.0)
        mine, theirs = await pair.dial()
        mine.channel.send(b"new")
        await asyncio.sleep(1.0)
        assert theirs.words == [b"old", b"new"]

    play(scenario, Weather(duplicates=1.0))


def test_peers_overtake_each_other() -> None:
    """The order of what two hosts send to a third follows from the seed."""

    async def order(sim: Simulation) -> str:
        ends: list[End] = []
        heard: list[bytes] = []

        class Listener(End):
            def received(self, payload: memoryview) -> None:
                heard.append(bytes(payload))

        def accept(channel: Channel) -> End:
            ends.append(Listener(sim))
            return ends[-1]

        transport = SimTransport(sim.network)
        await sim.start(sim.host("c"), transport.listen("c", accept))
        senders = [await sim.start(sim.host(name), transport.dial("c", End(sim))) for name in "ab"]
        for channel, word in zip(senders, (b"a", b"b"), strict=True):
            channel.send(word)
        await asyncio.sleep(1.0)
        return b"".join(heard).decode()

    assert {Simulation(seed).run(order) for seed in range(10)} == {"ab", "ba"}


def test_hosts_are_told_apart() -> None:
    assert Host("a") != Host("a")
