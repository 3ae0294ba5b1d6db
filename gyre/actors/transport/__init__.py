"""How frames reach another node: unix sockets, TCP, or memory, behind one interface.

An endpoint says by which: `unix:/path`, `tcp:host:port`, `memory:name`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gyre.actors.errors import LinkLost
from gyre.actors.transport.base import CLOSED, Accept, Channel, Listener, Receiver
from gyre.actors.transport.memory import dial_memory, listen_memory
from gyre.actors.transport.sockets import dial_tcp, dial_unix, listen_tcp, listen_unix

__all__ = ["CLOSED", "Accept", "Channel", "Listener", "Receiver", "TransportName", "dial", "listen"]


TransportName = Literal["unix", "tcp", "memory"]


async def listen(
    kind: TransportName, name: str, accept: Accept, *, folder: Path | None, host: str
) -> Listener:
    """Listens as the node called `name`; `accept` gets each channel."""
    match kind:
        case "unix":
            assert folder is not None
            return await listen_unix(folder / f"{name}.sock", accept)
        case "tcp":
            return await listen_tcp(host, accept)
        case "memory":
            return listen_memory(name, accept)


async def dial(endpoint: str, receiver: Receiver) -> Channel:
    """A channel to a listening node, its frames to `receiver`. Raises LinkLost."""
    kind, _, rest = endpoint.partition(":")
    try:
        match kind:
            case "unix":
                return await dial_unix(rest, receiver)
            case "tcp":
                host, _, port = rest.rpartition(":")
                return await dial_tcp(host, int(port), receiver)
            case "memory":
                return dial_memory(rest, receiver)
    except (OSError, ValueError) as error:
        raise LinkLost(f"cannot reach {endpoint}: {error}") from error
    raise LinkLost(f"cannot reach {endpoint!r}: no such transport")
