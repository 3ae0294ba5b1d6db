from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gyre.harness.relay import Relay

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def relayed(socket: Path, server: asyncio.Server) -> AsyncIterator[Relay]:
    port = server.sockets[0].getsockname()[1]
    relay = Relay(socket, "127.0.0.1", port)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says all again once it has heard the end."""
    writer.write(await reader.read())
    writer.close()


async def test_what_is_said_and_answered_goes_through_unchanged(tmp_path: Path) -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    said = [secrets.token_bytes(300_000), b"", b"x"]
    async with relayed(tmp_path / "s" / "p", server):

        async def call(data: bytes) -> bytes:
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s" / "p")
            writer.write(data)
            writer.write_eof()
            try:
                return await reader.read()
            finally:
                writer.close()

        assert await asyncio.gather(*map(call, said)) == said


async def test_a_proxy_that_hangs_up_is_seen_to_hang_up(tmp_path: Path) -> None:
    def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with relayed(tmp_path / "s" / "p", server):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s" / "p")
        assert await reader.read() == b""
        writer.close()


async def test_a_proxy_that_is_away_for_a_while_is_reached_again(tmp_path: Path) -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with relayed(tmp_path / "s" / "p", server):
        server.close()
        await server.wait_closed()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s" / "p")
        assert await reader.read() == b""
        writer.close()
        async with await asyncio.start_server(echo, "127.0.0.1", port):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s" / "p")
            writer.write(b"again")
            writer.write_eof()
            assert await reader.read() == b"again"
            writer.close()


async def test_a_proxy_that_is_not_reached_is_an_error_at_once(tmp_path: Path) -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    relay = Relay(tmp_path / "s" / "p", "127.0.0.1", port)
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await relay.start()
    await relay.stop()


async def test_when_it_stops_its_connections_end_and_nobody_complains(tmp_path: Path) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    came: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # On the first one, with which it looks for the proxy, nothing is said.
        if await reader.read(1):
            came.set_result((reader, writer))

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    async with relayed(tmp_path / "s" / "p", server):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s" / "p")
        writer.write(b"?")
        await came
    assert await reader.read() == b""
    writer.close()
    await asyncio.sleep(0)
    assert complaints == []
