"""How frames reach another node: unix sockets, TCP, or memory, behind one interface.

An endpoint says by which: `unix:/path`, `tcp:host:port`, `memory:name`.
"""

from __future__ import annotations

from typing import Literal

from gyre.actors.transport.base import CLOSED, Accept, Channel, Listener, Receiver, Transport
from gyre.actors.transport.memory import MemoryTransport
from gyre.actors.transport.sockets import TcpTransport, UnixTransport

__all__ = [
    "CLOSED",
    "Accept",
    "Channel",
    "Listener",
    "Receiver",
    "Transport",
    "TransportName",
    "make_transport",
]

TransportName = Literal["unix", "tcp", "memory"]


def make_transport(scheme: str, where: str = "") -> Transport:
    """By its name. ValueError where there is none such."""
    match scheme:
        case "unix":
            return UnixTransport(where)
        case "tcp":
            return TcpTransport(where)
        case "memory":
            return MemoryTransport()
    raise ValueError(f"no transport {scheme!r}: unix, tcp or memory")
