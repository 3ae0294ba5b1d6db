"""All transports, by one name each."""

from __future__ import annotations

import asyncio
import random

from gyre.actors.testing import Host, SimLoop, SimNetwork, SimTransport, Weather
from gyre.actors.transport import Transport, make_transport

TRANSPORTS = ("memory", "unix", "tcp", "ucx", "simulated")


def simulated_loop() -> SimLoop:
    return SimLoop(random.Random(0))


class World:
    """Where the transports of a test meet."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._network: SimNetwork | None = None

    def transport(self, host: str = "") -> Transport:
        """One more."""
        if self.kind != "simulated":
            return make_transport(self.kind)
        if self._network is None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimLoop)
            self._network = SimNetwork(loop, random.Random(0), Weather())
        return SimTransport(self._network, Host(host))
