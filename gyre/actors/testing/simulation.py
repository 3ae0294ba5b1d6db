"""Nodes, their network and their processes in one process, in virtual time, by a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from gyre.actors.node import Node
from gyre.actors.supervision import Supervision
from gyre.actors.testing.invariants import Invariants
from gyre.actors.testing.loop import Host, SimLoop, SimTask
from gyre.actors.testing.network import SimNetwork, SimTransport, Weather
from gyre.actors.testing.processes import SimProcess

T = TypeVar("T")

TOKEN = b"simulated"
MAX_STEPS = 5_000_000


class Violated(AssertionError):
    """An invariant does not hold."""


class Simulation:
    """One run. `rng` is for the scenario's own choices; all else that is random follows from the same seed.
    The invariants are checked after each step, of the host that did it; the first that does not hold ends
    the run with Violated."""

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.loop = SimLoop(self._branch())
        self.network = SimNetwork(self.loop, self._branch(), weather or Weather())
        self.hosts: list[Host] = []
        self.nodes: dict[Host | None, list[Node]] = {}
        self._parents: dict[Host, Host | None] = {}
        self._deaths: dict[Host, Callable[[int], None]] = {}
        self._tasks: list[SimTask[Any]] = []
        self._faults: list[str] = []
        self.max_steps = MAX_STEPS
        self._invariants = Invariants(self.nodes)
        self.loop.set_exception_handler(self._on_fault)
        self.loop.after_step = self._check

    def run(self, scenario: Callable[[Simulation], Coroutine[Any, Any, T]]) -> T:
        """Runs a scenario to its end."""
        try:
            return self.loop.run_until_complete(scenario(self))
        finally:
            self.loop.after_step = lambda host: None
            self._bury()
            self.loop.close()

    @property
    def trace(self) -> str:
        """The hash of all that happened."""
        return self.loop.trace

    # --- hosts ------------------------------------------------------------------------------------

    def host(self, name: str, parent: Host | None = None) -> Host:
        """A process, or a machine with one process."""
        host = Host(name)
        self.hosts.append(host)
        self._parents[host] = parent
        return host

    def node(
        self,
        name: str,
        host: Host,
        *,
        token: bytes = TOKEN,
        node_id: str | None = None,
        supervision: Supervision | None = None,
    ) -> Node:
        """A node for that host: enter it in a task that was started there."""
        node = Node(
            name,
            transport=SimTransport(self.network),
            token=token,
            node_id=node_id or self.rng.randbytes(8).hex(),
            rng=self._branch(),
            carrier=partial(SimProcess, self),
            supervision=supervision,
            clock=self.loop.time,
        )
        self.nodes.setdefault(host, []).append(node)
        return node

    def start(self, host: Host, coroutine: Coroutine[Any, Any, T]) -> SimTask[T]:
        """Runs a coroutine on a host."""
        task = self.loop.create_task(coroutine, context=host.context.copy())
        self._tasks.append(task)
        return task

    def kill(self, host: Host) -> None:
        """kill -9: nothing of it runs any more, the kernel closes its connections; its children die too."""
        self._end(host, -9, vanish=False)

    def power_off(self, host: Host) -> None:
        """Its peers hear nothing of its end."""
        self._end(host, -9, vanish=True)

    def exit(self, host: Host, code: int) -> None:
        """A process that comes to its end."""
        self._end(host, code, vanish=False)

    def on_death(self, host: Host, tell: Callable[[int], None]) -> None:
        self._deaths[host] = tell

    def pid(self, host: Host) -> int:
        return self.hosts.index(host) + 1

    def _end(self, host: Host, code: int, *, vanish: bool) -> None:
        if not host.alive:
            return
        self.loop.record(f"end of {host.name} {code}")
        host.alive = False
        (self.network.vanish if vanish else self.network.exit)(host)
        for child in [child for child, parent in self._parents.items() if parent is host]:
            self._end(child, -9, vanish=vanish)
        self._forget(host)
        if host in self._deaths:
            self._deaths.pop(host)(code)

    def _forget(self, host: Host) -> None:
        """A run of days has many processes."""
        del self._parents[host]
        self.nodes.pop(host, None)
        self._tasks = [task for task in self._tasks if not task.done()]

    # --- what must hold -----------------------------------------------------------------------------

    def violate(self, what: str) -> None:
        """The scenario found something that must not be."""
        self._faults.append(what)

    def _check(self, host: Host | None) -> None:
        if self.loop.steps > self.max_steps:
            self._faults.append(f"{self.max_steps} steps and no end")
        faults = self._faults or self._invariants.check(host, self.loop.time())
        if faults:
            self._faults = []
            raise Violated(f"seed {self.seed} at {self.loop.time():.6f} s: {'; '.join(faults)}")

    def assert_quiet(self) -> None:
        """After all nodes were left: nothing of the living is left behind."""
        left = [task for task in asyncio.all_tasks(self.loop) if task is not asyncio.current_task()]
        names = sorted(
            t.get_name() for t in left if isinstance(t, SimTask) and (t.host is None or t.host.alive)
        )
        connections = sum(self.network.open_connections(host) for host in self.hosts)
        if names or connections:
            raise Violated(f"seed {self.seed}: left behind: {connections} connections, tasks {names}")

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._faults.append(f"{context['message']}: {error!r}")

    def _branch(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def _bury(self) -> None:
        """Lets the dead go without a word: their coroutines would run their `finally` when collected."""
        buried: set[asyncio.Task[Any]] = set()
        while left := asyncio.all_tasks(self.loop) - buried:  # a `finally` may start another
            buried |= left
            for task in left:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
