"""Mutated frames at a listening node: nothing crashes or hangs, memory stays, one line for each connection.

GYRE_FRAMES=1000000 pytest tests/actors/test_million_frames.py
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter as Tally
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.actors import Actor, ActorDied, Ask, ChildSpec, Node, Stream, Supervision, Tell, handles
from gyre.actors.framing import header
from gyre.actors.handshake import NONCE_BYTES, DiallerHandshake, Peer
from gyre.actors.link import Link
from gyre.actors.transport import TransportName
from gyre.actors.wire import STREAM, Demand, Request
from tests.actors.frames import Nonsense
from tests.actors.test_links import TOKEN

FRAMES = int(os.environ.get("GYRE_FRAMES", "4000"))
MOST_A_CONNECTION = 200
TARGETS = 3
# A link's own line, or that of a stranger who was refused; and what actors themselves come to.
OF_A_CONNECTION = {"link_lost", "peer_refused"}
OF_ACTORS = {"dead_letters", "actor_died", "actor_restarted"}


class Bump(Tell, frozen=True, kw_only=True):
    amount: int


class Add(Ask[int], frozen=True, kw_only=True):
    amount: int


class Wait(Ask[int], frozen=True, kw_only=True):
    amount: int


class Count(Stream[int], frozen=True, kw_only=True):
    amount: int


class Target(Actor):
    @handles(Bump)
    async def bump(self, message: Bump) -> None:
        await asyncio.sleep(0)

    @handles(Add)
    async def add(self, message: Add) -> int:
        return message.amount

    @handles(Wait, concurrent=True)
    async def wait(self, message: Wait) -> int:
        return await asyncio.get_running_loop().create_future()  # until its asker's link is gone

    @handles(Count)
    async def count(self, message: Count) -> AsyncIterator[int]:
        for number in range(message.amount):
            yield number


MESSAGES = (Bump, Add, Wait, Count)


def nonsense(rng: random.Random, node: Node) -> Nonsense:
    names = [f"{message.__module__}:{message.__qualname__}" for message in MESSAGES]
    bodies = [node.codec.encode({"amount": amount}) for amount in (0, 1, 10**6, -1, 2**64 - 1, "x", None)]
    return Nonsense(rng, node.codec, names, bodies)


class Attack:
    """Connections, one after another, each with what `nonsense` draws."""

    def __init__(self, node: Node, rng: random.Random) -> None:
        self.node = node
        self.rng = rng
        self.nonsense = nonsense(rng, node)
        self.connections = 0
        self.recorded = b""

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.connections += 1
        scheme, _, rest = self.node.endpoint.partition(":")
        if scheme == "unix":
            return await asyncio.open_unix_connection(rest)
        host, _, port = rest.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def as_stranger(self) -> None:
        """Without the token."""
        reader, writer = await self.connect()
        handshake = DiallerHandshake(b"guessed", Peer("f" * 16, "x", ""), b"n" * NONCE_BYTES)
        rng = self.rng
        match rng.randrange(6):
            case 0:
                writer.write(rng.randbytes(rng.randrange(1, 300)))
            case 1:
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            case 2:
                writer.write(framed(handshake.hello()) + framed(self.nonsense.mutated(1)))
            case 3:
                writer.write(self.recorded)  # of one that was let in
            case 4:
                writer.write(self.nonsense.lie(handshake.hello()))
            case 5:
                hello = bytearray(handshake.hello())
                hello[rng.randrange(len(hello))] = rng.randrange(256)
                writer.write(framed(bytes(hello)))
        await self.over(reader, writer)

    async def as_peer(self) -> None:
        """With the token: frames until one ends the link."""
        reader, writer = await self.authenticated()
        rng, nonsense, seq = self.rng, self.nonsense, 0
        nonsense.targets = [life.id for life in self.node.lives.values()] or [1]
        batch = []
        for _ in range(rng.randrange(1, MOST_A_CONNECTION)):
            seq += 1
            payload = nonsense.mutated(seq) if rng.random() < 0.04 else nonsense.well_formed(seq)
            batch.append(framed(payload))
            if nonsense.ends_the_link(payload, seq):
                break
        match rng.randrange(8):
            case 0:
                batch.append(rng.choice(batch))  # a replay
            case 1:
                batch.append(nonsense.lie(nonsense.well_formed(seq + 1)))
            case 2:
                batch.append(framed(nonsense.well_formed(seq + 2))[: rng.randrange(1, 20)])
        writer.write(b"".join(batch))
        await self.over(reader, writer)

    async def authenticated(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect()
        peer = Peer(self.rng.randbytes(8).hex(), "peer", "")
        handshake = DiallerHandshake(TOKEN, peer, self.rng.randbytes(NONCE_BYTES))
        hello = framed(handshake.hello())
        writer.write(hello)
        proof = framed(handshake.on_hello(memoryview(await read_frame(reader))))
        writer.write(proof)
        handshake.on_verdict(memoryview(await read_frame(reader)))
        self.recorded = hello + proof
        return reader, writer

    async def over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads what comes until the node has ended the connection: it must, in the end."""
        with suppress(ConnectionError):
            if writer.can_write_eof():
                writer.write_eof()
            async with asyncio.timeout(30):
                while await reader.read(65536):
                    pass
        writer.close()


def framed(payload: bytes) -> bytes:
    return header(len(payload)) + payload


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture(params=["unix", "tcp"])
async def listening(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    transport: TransportName = request.param
    rules = Supervision(max_restarts=10**9, window_s=1.0)
    async with Node(name="b", transport=transport, token=TOKEN, supervision=rules) as node:
        await node.listen()
        for index in range(TARGETS):
            await node.spawn(ChildSpec(name=f"target-{index}", start=Target))
        yield node


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Tally[str]:
    """Counts what reaches a link."""
    counted: Tally[str] = Tally()
    receive = Link.received

    def counting(self: Link, payload: memoryview) -> None:
        counted["frames"] += 1
        receive(self, payload)

    monkeypatch.setattr(Link, "received", counting)
    return counted


@pytest.mark.timeout(60 + FRAMES // 200)
async def test_mutated_frames_end_their_connection_at_most(listening: Node, received: Tally[str]) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    attack = Attack(listening, random.Random(FRAMES))
    lines: Tally[str] = Tally()
    resident: list[float] = []
    descriptors = len(os.listdir("/proc/self/fd"))
    with structlog.testing.capture_logs() as logs:
        while received["frames"] < FRAMES // 2:
            before = attack.connections
            async with asyncio.timeout(60):
                for _ in range(50):
                    await (attack.as_stranger() if attack.rng.random() < 0.2 else attack.as_peer())
                await still_works(listening)
            of_connections = sum(line["event"] in OF_A_CONNECTION for line in logs)
            assert of_connections <= attack.connections - before
            lines.update(line["event"] for line in logs)
            logs.clear()
            resident.append(resident_mib())
    assert faults == []
    assert set(lines) <= OF_A_CONNECTION | OF_ACTORS
    assert listening.links.all() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    warm = resident[len(resident) // 4]
    assert resident[-1] - warm < 48, f"MiB resident: {resident[:: max(1, len(resident) // 20)]}"
    print(f"\n{received['frames']} frames, {attack.connections} connections, {dict(lines)}")
    print(f"MiB resident {resident[0]:.0f}, {warm:.0f} at a quarter, {resident[-1]:.0f} at the end")


async def still_works(node: Node) -> None:
    """All are there and answer: also those that a peer had linked itself with, which die when it is gone."""
    for index in range(TARGETS):
        answer = None
        while answer is None:
            ref = node.lookup(f"target-{index}")
            try:
                answer = None if ref is None else await ref.ask(Add(amount=5), timeout_s=20.0)
            except ActorDied:
                await asyncio.sleep(0.01)
            else:
                await asyncio.sleep(0)
        assert answer == 5


FIELDS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 17), st.lists(FIELDS, max_size=11)), min_size=1, max_size=6))
def test_frames_of_any_fields_end_their_connection_at_most(frames: list[tuple[int, list[Any]]]) -> None:
    """Found by hypothesis, so small when they fail."""

    async def main() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        rules = Supervision(max_restarts=10**9, window_s=1.0)
        async with Node(name="b", token=TOKEN, supervision=rules) as node:
            await node.listen()
            await node.spawn(ChildSpec(name="target-0", start=Target))
            attack = Attack(node, random.Random(0))
            reader, writer = await attack.authenticated()
            for seq, (tag, fields) in enumerate(frames, 1):
                writer.write(framed(node.codec.encode([tag, seq, *fields])))
            await attack.over(reader, writer)
            ref = node.lookup("target-0")
            assert ref is not None
            assert await ref.ask(Add(amount=5), timeout_s=20.0) == 5
        assert faults == []

    with structlog.testing.capture_logs() as logs:
        asyncio.run(main())
    assert sum(line["event"] in OF_A_CONNECTION for line in logs) <= 1


async def test_a_consumer_that_claims_endless_room_does_not_stop_the_node(listening: Node) -> None:
    attack = Attack(listening, random.Random(1))
    reader, writer = await attack.authenticated()
    ref = listening.lookup("target-0")
    assert ref is not None
    name = f"{Count.__module__}:{Count.__qualname__}"
    body: Any = Count(amount=2**40)
    encode = listening.codec.encode
    writer.write(framed(encode(Request(1, STREAM, 7, ref.id, 0, 0, None, 0, 0, (), name, body))))
    writer.write(framed(encode(Demand(2, 7, 2**62))))
    async with asyncio.timeout(20):
        await attack.over(reader, writer)
        await still_works(listening)
    assert listening.links.all() == []
