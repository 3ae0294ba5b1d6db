"""Ports that a server is to take, held until it has them."""

from __future__ import annotations

import socket


class HeldPort:
    """A free port of this host, bound and not listened at: the system gives it to nobody who asks for any
    port, and a server that names it, with SO_REUSEADDR as servers do, gets it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]

    def answers(self) -> bool:
        """Whether somebody listens there already."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as caller:
            caller.settimeout(1.0)
            return caller.connect_ex(self._socket.getsockname()) == 0

    def close(self) -> None:
        self._socket.close()
