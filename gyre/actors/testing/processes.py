"""Child processes of a simulation: hosts that run what `python -m gyre.actors.child` would."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from gyre.actors.boot import Boot
from gyre.actors.carrier import OnEnd
from gyre.actors.child import Child
from gyre.actors.process import Parent
from gyre.actors.specs import ProcessSpec
from gyre.actors.testing.loop import HOST, Host, SimTask

if TYPE_CHECKING:
    from gyre.actors.node import Node
    from gyre.actors.testing.simulation import Simulation


class SimProcess:
    """A Carrier. It dies with its parent, as the kernel has it."""

    def __init__(self, simulation: Simulation, node: Node, spec: ProcessSpec) -> None:
        self._simulation = simulation
        self._spec = spec
        self._parent_host = HOST.get()
        self._parent: Parent
        self._ended: OnEnd
        self.host: Host
        self.pid = 0

    async def start(self, boot: Boot, ended: OnEnd) -> None:
        simulation = self._simulation
        self._ended = ended
        self._parent = Parent(boot.parent.node_id)
        self.host = simulation.host(f"{boot.name}.{boot.incarnation}", parent=self._parent_host)
        self.pid = simulation.pid(self.host)
        simulation.on_death(self.host, self._died)
        child = Child(boot)
        child.load()
        node = simulation.node(boot.name, self.host, token=boot.token, node_id=boot.node_id)
        task = simulation.start(self.host, child.main(node, self._parent))
        task.add_done_callback(self._returned, context=self.host.context)

    def signal(self, number: signal.Signals) -> None:
        if not self.host.alive:
            return
        if number == signal.SIGKILL:
            self._simulation.kill(self.host)
        else:
            self._simulation.loop.call_soon(self._parent.terminate, context=self.host.context)

    def _returned(self, task: SimTask[int]) -> None:
        crashed = task.cancelled() or task.exception() is not None
        self._simulation.exit(self.host, 1 if crashed else task.result())

    def _died(self, code: int) -> None:
        """The parent's kernel tells it, after what the process has sent."""
        if self._parent_host is not None:
            simulation, context = self._simulation, self._parent_host.context
            simulation.loop.call_later(
                simulation.network.weather.latency_s[1], self._ended, code, (), context=context
            )
