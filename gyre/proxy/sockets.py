"""The addresses at which a proxy is reached: bound and listened at by who outlives the proxy, so that
connections wait in them while there is none."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Self

import msgspec

from gyre.proxy.config import ProxyConfig

_LONGEST_SOCKET_PATH = 107
# Connections that wait until the proxy takes them; the system may allow fewer.
BACKLOG = 4096


class CannotListen(OSError):
    """The proxy's address cannot be had."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"the proxy cannot listen on {address}: {reason}")
        self.address = address


class Descriptors(msgspec.Struct, frozen=True, kw_only=True):
    """Of listening sockets, in a process that has inherited them."""

    tcp: int
    unix: int | None


class ListeningSockets:
    """`base_url` ends in `/v1`. `close` frees what `open` took; of inherited ones nothing but this process'
    descriptors."""

    def __init__(self, tcp: socket.socket, unix: socket.socket | None, path: Path | None) -> None:
        self.tcp = tcp
        self.unix = unix
        self._path = path
        host, port = tcp.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.base_url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"

    @classmethod
    async def open(cls, config: ProxyConfig, unix_socket: Path | None) -> Self:
        """Raises CannotListen."""
        tcp = await _listen_tcp(config.host, config.port)
        try:
            unix = None if unix_socket is None else _listen_unix(unix_socket)
        except BaseException:
            tcp.close()
            raise
        return cls(tcp, unix, unix_socket)

    @classmethod
    def inherited(cls, descriptors: Descriptors) -> Self:
        unix = None if descriptors.unix is None else socket.socket(fileno=descriptors.unix)
        return cls(socket.socket(fileno=descriptors.tcp), unix, None)

    @property
    def descriptors(self) -> Descriptors:
        return Descriptors(tcp=self.tcp.fileno(), unix=None if self.unix is None else self.unix.fileno())

    def close(self) -> None:
        self.tcp.close()
        if self.unix is not None:
            self.unix.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


async def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Of a name for both, such as localhost, the address that all clients try.
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            _listen(listening)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise CannotListen(f"{host}:{port}", _why_not(error)) from error
    return listening


def _listen_unix(path: Path) -> socket.socket:
    if len(str(path).encode()) > _LONGEST_SOCKET_PATH:
        raise CannotListen(str(path), f"a socket's path has at most {_LONGEST_SOCKET_PATH} bytes")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            path.unlink()
        listening.bind(str(path))
        _listen(listening)
    except OSError as error:
        listening.close()
        raise CannotListen(str(path), str(error)) from error
    return listening


def _listen(listening: socket.socket) -> None:
    listening.listen(BACKLOG)
    listening.setblocking(False)


def _why_not(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; set harness.proxy.port to another one, or to 0 for a free one"
    return f"{error.strerror or error} (harness.proxy.host, harness.proxy.port)"
