"""A complaint of connections that close at the wrong byte: closed at every byte there is."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from contextlib import suppress
from pathlib import Path

import pytest

from gyre.actors import ActorDied, Node, Ref
from tests.actors.conftest import start
from tests.actors.test_links import TOKEN, carry
from tests.actors.zoo import Add, Counter


class Relay:
    """Between two nodes, until so many bytes have come back from the listening one."""

    def __init__(self, endpoint: str, path: Path) -> None:
        self.to = endpoint.removeprefix("unix:")
        self.path = path
        self.limit = -1
        self.passed = 0
        self.ways: set[asyncio.Task[None]] = set()

    async def start(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._accept, self.path)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_unix_connection(self.to)
        ways = [
            asyncio.create_task(self._pass(reader, there, bounded=False)),
            asyncio.create_task(self._pass(there_reader, writer, bounded=True)),
        ]
        self.ways |= {*ways}
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (writer, there):
            end.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, bounded: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if bounded and 0 <= self.limit < self.passed + len(data):
                    writer.write(data[: self.limit - self.passed])
                    return
                self.passed += len(data) if bounded else 0
                writer.write(data)
                await writer.drain()


async def conversation(server: Ref, far: Node, relay: Relay) -> str:
    """One node that comes, asks three times, and goes."""
    async with Node(name="near", token=TOKEN) as near:
        await near.listen()
        ref = carry(server, far, near)
        ref = near.bind(ref.node_id, f"unix:{relay.path}", ref.id, ref.name, ref.incarnation)
        asked = [asyncio.ensure_future(ref.ask(Add(amount=1), timeout_s=20.0)) for _ in range(3)]
        await asyncio.wait(asked)
        ends = [ask.exception() for ask in asked]
    assert all(end is None or isinstance(end, ActorDied) for end in ends), ends
    return "".join("+" if end is None else "-" for end in ends)


@pytest.mark.timeout(180)
async def test_a_connection_closed_at_any_byte_fails_what_waits_for_it(tmp_path: Path) -> None:
    """A connection that closed just as data came left its futures waiting for ever (mars PR 2404)."""
    ends: Tally[str] = Tally()
    async with Node(name="far", token=TOKEN) as far:
        endpoint = await far.listen()
        server = await start(far, Counter())
        relay = Relay(endpoint, tmp_path / "relay.sock")
        async with await relay.start():
            assert await conversation(server, far, relay) == "+++"
            whole, step = relay.passed, 1
            assert 200 < whole < 1000
            for limit in range(0, whole, step):
                relay.limit, relay.passed = limit, 0
                async with asyncio.timeout(10):
                    ends[await conversation(server, far, relay)] += 1
            await asyncio.wait(relay.ways)
        async with asyncio.timeout(20):
            for link in far.links.all():
                await link.drain()
            assert await server.ask(Add(amount=0)) >= 3
    assert set(ends) >= {"---", "+--", "++-"}
    assert not {end for end in ends if "-+" in end}, "an answer came after one that was lost"
