"""The proxy's socket on a machine where the proxy is not: what connects to it goes there over TCP."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

CHUNK_BYTES = 65536


class Relay:
    """Listens at `socket`, whose folder is made."""

    def __init__(self, socket: Path, host: str, port: int) -> None:
        self._socket = socket
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def start(self) -> None:
        """Raises OSError where the proxy is not reached."""
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.close()
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, self._socket)

    async def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped:  # it was accepted just before
            writer.close()
            return
        connection = asyncio.create_task(self._connected(reader, writer), name="relay")
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                await self._connect(reader, writer)
        finally:
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, far_writer))
                both.create_task(_pump(far_reader, writer))
        except* OSError:
            pass
        finally:
            far_writer.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """An end of one side becomes an end of the other."""
    while data := await source.read(CHUNK_BYTES):
        sink.write(data)
        await sink.drain()
    sink.write_eof()
