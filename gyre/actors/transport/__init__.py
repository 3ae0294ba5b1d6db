"""How frames reach another node: unix sockets, TCP, UCX, or memory, behind one interface.

An endpoint says by which: `unix:/path`, `tcp:host:port`, `ucx:host:port`, `memory:name`.
"""

from __future__ import annotations

from typing import Literal

from gyre.actors.log import log
from gyre.actors.transport.base import (
    CLOSED,
    Accept,
    Channel,
    Listener,
    Receiver,
    Transport,
    TransportUnusable,
)
from gyre.actors.transport.memory import MemoryTransport
from gyre.actors.transport.sockets import TcpTransport, UnixTransport

__all__ = [
    "CLOSED",
    "Accept",
    "Channel",
    "Listener",
    "Receiver",
    "TcpTransport",
    "Transport",
    "TransportName",
    "TransportUnusable",
    "make_transport",
    "usable_transport",
]

TransportName = Literal["unix", "tcp", "ucx", "memory"]


def make_transport(scheme: str, where: str = "") -> Transport:
    """By its name. ValueError where there is none such, TransportUnusable where it cannot be used here."""
    match scheme:
        case "unix":
            return UnixTransport(where)
        case "tcp":
            return TcpTransport(where)
        case "ucx":
            from gyre.actors.transport.ucx import UcxTransport  # few need it

            return UcxTransport(where)
        case "memory":
            return MemoryTransport()
    raise ValueError(f"no transport {scheme!r}: unix, tcp, ucx or memory")


def usable_transport(scheme: str, where: str = "") -> Transport:
    """As `make_transport`, but TCP, and a line that says why, where this process cannot use it."""
    try:
        return make_transport(scheme, where)
    except TransportUnusable as error:
        log.warning("transport_unusable", transport=scheme, why=error.why, fix=error.fix, used="tcp")
        return TcpTransport(where)
