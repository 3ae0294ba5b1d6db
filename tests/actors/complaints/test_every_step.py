"""Complaints of what gets lost when something happens at the wrong moment: tried at every moment there is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from gyre.actors import Actor, ActorDied, Ask, ChildSpec, Node, ProcessSpec, Ref, handles
from gyre.actors.testing import Host, Simulation

HEARTBEATS_S = 4 * 5.0


class Count(Ask[int], frozen=True, kw_only=True):
    id: int


class Hang(Ask[int], frozen=True, kw_only=True):
    pass


class Server(Actor):
    def __init__(self) -> None:
        self.handled: Counter[int] = Counter()
        self.hanging = 0

    @handles(Count)
    async def count(self, message: Count) -> int:
        self.handled[message.id] += 1
        await asyncio.sleep(0.01)
        return message.id

    @handles(Hang)
    async def hang(self, message: Hang) -> int:
        self.hanging += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging -= 1
        return 0


class Unwilling(Actor):
    async def started(self) -> None:
        raise OSError("not here")


def after(sim: Simulation, steps: int, do: Callable[[], object]) -> None:
    """Does it once, so many steps from now."""
    check, begun = sim.loop.after_step, sim.loop.steps

    def after_step(host: Host | None) -> None:
        check(host)
        if sim.loop.steps >= begun + steps:
            sim.loop.after_step = check
            do()

    sim.loop.after_step = after_step


class TwoHosts:
    """A server at one, a client at the other."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.near, self.far = sim.host("near"), sim.host("far")
        self.server = Server()
        self.nodes: dict[str, Node] = {}
        self.ref: asyncio.Future[tuple[Ref, str]] = sim.loop.create_future()
        self.over = asyncio.Event()

    async def serve(self) -> None:
        async with self.sim.node("far", self.far) as node:
            self.nodes["far"] = node
            ref = await node.spawn(ChildSpec(name="server", start=lambda: self.server))
            self.ref.set_result((ref, await node.listen()))
            await self.over.wait()

    async def carried(self, node: Node) -> Ref:
        self.nodes["near"] = node
        ref, endpoint = await self.ref
        return node.bind(ref.node_id, endpoint, ref.id, ref.name, ref.incarnation)

    def assert_nothing_is_kept(self) -> None:
        assert self.server.hanging == 0
        for node in self.nodes.values():
            assert all(not link.pending and not link.incoming for link in node.links.all())
            assert all(not life.mailbox.queue for life in node.lives.values())


@pytest.mark.parametrize("warm", [False, True])
def test_a_cancel_is_never_lost_whenever_it_comes(warm: bool) -> None:
    """A cancel that came before the call was registered was lost, and the call ran on (ray#52628)."""
    reached = Counter[str]()

    async def scenario(sim: Simulation) -> None:
        two = TwoHosts(sim)
        serving = sim.start(two.far, two.serve())

        async def client() -> None:
            async with sim.node("near", two.near) as node:
                server = await two.carried(node)
                if warm:
                    await server.ask(Count(id=0))
                asking = asyncio.ensure_future(server.ask(Hang(), timeout_s=100.0))
                after(sim, sim.seed, asking.cancel)
                await asyncio.wait([asking])
                reached["cancelled" if asking.cancelled() else "answered"] += 1
                # It is the next: an actor that still hung would not come to it.
                assert await server.ask(Count(id=1), timeout_s=5.0) == 1
                await asyncio.sleep(1.0)
                two.assert_nothing_is_kept()

        await sim.start(two.near, client())
        two.over.set()
        await serving

    for step in range(1, 40):
        Simulation(step).run(scenario)
    assert reached == {"cancelled": 39}


@pytest.mark.parametrize("actor", ["Server", "Unwilling"])
def test_a_spawn_that_is_cancelled_at_any_step_leaves_no_process(actor: str) -> None:
    """The same of a start, also of one that is about to fail: what was cancelled as it began lived on."""
    ends = Counter[str]()

    async def scenario(sim: Simulation) -> None:
        root = sim.host("root")

        async def main() -> None:
            async with sim.node("root", root) as node:
                spec = ProcessSpec(name="p", actor=f"tests.actors.complaints.test_every_step:{actor}")
                spawning = asyncio.ensure_future(node.spawn(spec))
                after(sim, sim.seed, spawning.cancel)
                await asyncio.wait([spawning])
                if spawning.cancelled() or spawning.exception() is not None:
                    assert node.processes.all() == []
                    assert [host.name for host in sim.hosts if host.alive] == ["root"]
                    assert node.lookup("p") is None
                failed = None if spawning.cancelled() else spawning.exception()
                ends["cancelled" if spawning.cancelled() else str(failed)[-40:]] += 1

        await sim.start(root, main())
        sim.assert_quiet()

    for step in range(1, 60):
        Simulation(step).run(scenario)
    assert ends["cancelled"] > 10
    assert len(ends) == 2, ends
    assert any(("None" if actor == "Server" else "OSError: not here") in end for end in ends), ends


def test_a_reset_at_any_step_leaves_no_hole_and_doubles_nothing() -> None:
    """After a reconnect a hole in the sequence was waited for, and a task was sent twice (ray PR 52759,
    ray PR 52833)."""
    ends = Counter[str]()

    async def scenario(sim: Simulation) -> None:
        two = TwoHosts(sim)
        serving = sim.start(two.far, two.serve())

        async def client() -> None:
            async with sim.node("near", two.near) as node:
                server = await two.carried(node)
                broken = asyncio.Event()
                after(sim, sim.seed, lambda: broken.set() or sim.network.break_connections(two.near))
                for id in range(4):
                    try:
                        assert await server.ask(Count(id=id), timeout_s=5.0) == id
                        ends["answered"] += 1
                        assert two.server.handled[id] == 1
                    except ActorDied:
                        ends["died"] += 1
                        assert two.server.handled[id] <= 1
                if not broken.is_set():
                    return
                await asyncio.sleep(1.0)  # it may have been in the last step
                began = sim.loop.time()
                assert await server.ask(Count(id=9), timeout_s=5.0) == 9
                assert sim.loop.time() - began < 0.2
                await asyncio.sleep(1.0)
                two.assert_nothing_is_kept()

        await sim.start(two.near, client())
        two.over.set()
        await serving
        assert max(two.server.handled.values()) == 1

    for step in range(1, 120):
        Simulation(step).run(scenario)
    assert ends["died"] > 20
    assert ends["answered"] > 300


@pytest.mark.parametrize("seed", range(5))
def test_a_call_to_a_machine_that_lost_power_ends_in_the_window(seed: int) -> None:
    """A call to a dead actor hung until a keepalive of twenty minutes (ray#26772)."""

    async def scenario(sim: Simulation) -> None:
        two = TwoHosts(sim)
        sim.start(two.far, two.serve())

        async def client() -> None:
            async with sim.node("near", two.near) as node:
                server = await two.carried(node)
                asked = [asyncio.ensure_future(server.ask(Hang(), timeout_s=1200.0)) for _ in range(10)]
                await asyncio.sleep(1.0 + sim.rng.random() * 10.0)
                sim.power_off(two.far)
                died = sim.loop.time()
                await asyncio.wait(asked)
                assert all(isinstance(ask.exception(), ActorDied) for ask in asked)
                assert sim.loop.time() - died <= HEARTBEATS_S + 5.0

        await sim.start(two.near, client())

    Simulation(seed).run(scenario)
