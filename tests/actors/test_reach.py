"""Nodes that reach each other by address: names, and processes on the other's machine."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog
from structlog.typing import EventDict

from gyre.actors import (
    ActorDied,
    ChildSpec,
    Follow,
    LinkLost,
    Node,
    NodeFailed,
    Ref,
    SpawnFailed,
    Supervisor,
    WhereIs,
)
from gyre.actors.framing import header
from gyre.actors.handshake import NONCE_BYTES, ListenerHandshake, Peer
from gyre.actors.testing import Simulation
from tests.actors.conftest import start
from tests.actors.test_process import gone, observe, spec
from tests.actors.test_supervisor import Follower
from tests.actors.zoo import (
    Add,
    Count,
    Counter,
    CounterConfig,
    Crash,
    GetEnv,
    Incarnation,
    Look,
    Observed,
    Pid,
    Quit,
)

TOKEN = b"the token of these nodes"


@asynccontextmanager
async def tcp_node(name: str, token: bytes = TOKEN) -> AsyncIterator[Node]:
    async with Node(name, transport="tcp", token=token) as node:
        await node.listen()
        yield node


@pytest.fixture
async def there() -> AsyncIterator[Node]:
    async with tcp_node("there") as node:
        yield node
    assert node.processes.all() == []


@pytest.fixture
async def here(there: Node) -> AsyncIterator[Node]:
    """Left first."""
    async with tcp_node("here") as node:
        yield node
    assert node.processes.all() == []


def links(*nodes: Node) -> list[int]:
    return [len(node.links.all()) for node in nodes]


# --- reaching -----------------------------------------------------------------------------------------


async def test_a_node_is_reached_by_its_address(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    assert (desk.name, desk.node_id, desk.endpoint) == ("there", there.id, there.endpoint)


async def test_there_is_one_link_whoever_reaches_whom_how_often(here: Node, there: Node) -> None:
    reached = await asyncio.gather(
        *(here.reach(there.endpoint) for _ in range(3)), *(there.reach(here.endpoint) for _ in range(3))
    )
    assert {desk.node_id for desk in reached[:3]} == {there.id}
    assert {desk.node_id for desk in reached[3:]} == {here.id}
    counter = await start(there, Counter())
    ref = await here.find("a")
    assert ref == counter and ref is not None
    assert await ref.ask(Add(amount=3)) == 3
    assert links(here, there) == [1, 1]


async def test_a_wrong_token_is_refused_and_both_sides_say_so(there: Node) -> None:
    said = asyncio.Event()

    def hear(logger: object, method: str, line: EventDict) -> EventDict:
        said.set()
        return line

    with structlog.testing.capture_logs(processors=[hear]) as logs:
        async with tcp_node("here", token=b"another token") as here:
            with pytest.raises(LinkLost, match="wrong token"):
                await here.reach(there.endpoint)
            await said.wait()
            assert links(here, there) == [0, 0]
    assert [(line["event"], line["node"], line["why"]) for line in logs] == [
        ("peer_refused", "there", "refused: wrong token")
    ]


async def test_an_address_where_nobody_listens_is_an_error_at_once(here: Node) -> None:
    with pytest.raises(LinkLost, match=r"cannot reach 'tcp:127\.0\.0\.1:1'"):
        await here.reach("tcp:127.0.0.1:1")
    with pytest.raises(LinkLost, match="cannot reach 'nowhere'"):
        await here.reach("nowhere")


async def test_a_node_does_not_reach_itself(here: Node) -> None:
    with pytest.raises(LinkLost, match="this node itself"):
        await here.reach(here.endpoint)
    assert links(here) == [0]


async def test_reaching_that_is_given_up_leaves_no_link(here: Node) -> None:
    """The listener has proved itself and says no more."""
    proved = asyncio.Event()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = ListenerHandshake(TOKEN, Peer("f" * 16, "half", "tcp:127.0.0.1:1"), bytes(NONCE_BYTES))
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        hello = handshake.on_hello(memoryview(await reader.readexactly(length)))
        writer.write(header(len(hello)) + hello)
        await reader.readexactly(4)
        proved.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(half, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reaching = asyncio.create_task(here.reach(f"tcp:127.0.0.1:{port}"))
        await proved.wait()
        assert links(here) == [1]
        reaching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reaching
        assert links(here) == [0]


async def test_a_node_that_was_left_can_be_monitored_and_is_reached_again(here: Node) -> None:
    async with tcp_node("there") as there:
        desk = await here.reach(there.endpoint)
        observer = await observe(here, desk)
    (down,) = await observer.ask(Observed(count=1))
    assert down.ref == desk
    async with tcp_node("there") as again:
        assert await here.reach(again.endpoint) != desk


# --- names --------------------------------------------------------------------------------------------


async def test_names_are_found_at_every_node_that_is_known(here: Node, there: Node) -> None:
    async with tcp_node("third") as third:
        await here.reach(there.endpoint)
        await third.reach(there.endpoint)
        counter = await start(third, Counter(), "far")
        there.register("also", counter)
        for node in (here, there, third):
            assert await node.find("far") == counter
            assert await node.find("also") == counter
            assert await node.find("nobody") is None


async def test_at_says_where_a_name_is_looked_for(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    mine, other = await start(here, Counter(), "same"), await start(there, Counter(), "same")
    assert await here.find("same") == mine
    assert await here.find("same", at=desk) == other


async def test_a_name_leads_to_the_newest_life(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    follower = Follower()
    keeper = await start(there, Supervisor([ChildSpec(name="child", start=Counter)]), "keeper")
    await keeper.tell(Follow(watcher=await start(there, follower, "follower")))
    first = await keeper.ask(WhereIs(name="child"))
    assert first is not None
    there.register("worker", first)
    for life in (1, 2, 3):
        found = await here.find("worker", at=desk)
        assert found is not None
        assert await found.ask(Incarnation()) == life
        await found.tell(Crash())
        await follower.restarts.get()


async def test_a_name_whose_actor_ended_leads_nowhere_until_it_is_taken_over(node: Node) -> None:
    ref = await start(node, Counter())
    node.register("name", ref)
    await node.stop(ref)
    assert await node.find("name") is None
    node.register("name", await start(node, Counter(), "b"))
    found = await node.find("name")
    assert found is not None and found.name == "b"


async def test_a_child_process_finds_what_its_parent_finds(here: Node, there: Node) -> None:
    await here.reach(there.endpoint)
    counter = await start(there, Counter(), "far")
    finder = await here.spawn(spec("finder", "Finder", config=None))
    assert await finder.ask(Look(name="far")) == counter
    assert await finder.ask(Look(name="finder")) == finder


# --- processes on the other's machine -------------------------------------------------------------------


async def test_a_process_is_spawned_there(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    mine = await start(here, Counter(), "mine")
    ref = await here.spawn(spec(node=desk, config=CounterConfig(start=10, peer=mine)))
    assert [process.node_id for process in there.processes.all()] == [ref.node_id]
    assert await ref.ask(Add(amount=1)) == 11
    assert [item async for item in ref.stream(Count(upto=100))] == [*range(100)]
    pid = await ref.ask(Pid())
    await here.stop(ref)
    assert await gone(pid)
    assert there.processes.all() == []


async def test_it_has_the_environment_that_its_spec_says(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    ref = await here.spawn(spec(actor="Environ", node=desk, environment={"GYRE_ZOO": "1"}))
    assert await ref.ask(GetEnv(name="GYRE_ZOO")) == "1"


async def test_its_end_is_known_here_with_signal_and_last_words(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    ref = await here.spawn(spec(actor="Talker", node=desk))
    observer = await observe(here, ref)
    os.kill(_pid(there, ref), signal.SIGKILL)
    (down,) = await observer.ask(Observed(count=1))
    assert (down.reason.kind, down.reason.signal) == ("exit", "SIGKILL")
    assert down.reason.stderr_tail[-1] == "the last words"
    with pytest.raises(ActorDied, match="SIGKILL"):
        await ref.ask(Pid())


async def test_it_is_restarted_where_it_ran(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    follower = Follower()
    keeper = await start(here, Supervisor([spec(node=desk, restart="permanent")]), "keeper")
    await keeper.tell(Follow(watcher=await start(here, follower, "follower")))
    first = await keeper.ask(WhereIs(name="p"))
    assert first is not None
    os.kill(await first.ask(Pid()), signal.SIGKILL)
    restarted = await follower.restarts.get()
    assert restarted.reason.signal == "SIGKILL"
    assert await restarted.ref.ask(Incarnation()) == 2
    assert [process.node_id for process in there.processes.all()] == [restarted.ref.node_id]


async def test_incarnations_go_on_from_its_former_lives(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    ref = await here.spawn(spec(node=desk, former_lives=4))
    assert (ref.incarnation, await ref.ask(Incarnation())) == (5, 5)


async def test_one_that_ends_by_itself_has_ended_normally(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    ref = await here.spawn(spec(node=desk))
    observer = await observe(here, ref)
    await ref.tell(Quit())
    (down,) = await observer.ask(Observed(count=1))
    assert down.reason.kind == "normal"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"actor": "Missing"}, "has no attribute 'Missing'"),
        ({"actor": "Talker", "config": CounterConfig(start=1)}, "no start today"),
        ({"actor": "Talker", "config": CounterConfig(start=3), "start_timeout_s": 1.0}, "had not started"),
    ],
)
async def test_one_that_cannot_start_there_says_why(
    here: Node, there: Node, options: dict[str, object], why: str
) -> None:
    desk = await here.reach(there.endpoint)
    with pytest.raises(SpawnFailed, match=why):
        await here.spawn(spec(node=desk, **options))
    assert here.lookup("p") is None


async def test_when_the_askers_node_is_left_it_is_stopped_there(there: Node) -> None:
    async with tcp_node("here") as here:
        desk = await here.reach(there.endpoint)
        ref = await here.spawn(spec(node=desk))
        pid = await ref.ask(Pid())
    assert await gone(pid)


async def test_when_the_askers_machine_is_gone_it_is_stopped_there(here: Node, there: Node) -> None:
    desk = await here.reach(there.endpoint)
    ref = await here.spawn(spec(node=desk))
    observer = await observe(here, ref)
    pid = await ref.ask(Pid())
    link = here.links.get(there.id)
    assert link is not None
    link.give_up("the machine is gone")  # no word to the other side but the end of its connection
    (down,) = await observer.ask(Observed(count=1))
    assert down.reason.kind == "lost"
    assert await gone(pid)


async def test_a_node_that_is_left_takes_its_processes_with_it(here: Node) -> None:
    """Who monitors it learns the cause; nobody tries to start it again where nothing is."""
    async with tcp_node("there") as there:
        desk = await here.reach(there.endpoint)
        keeper = await start(here, Supervisor([spec(node=desk, restart="permanent")]), "keeper")
        ref = await keeper.ask(WhereIs(name="p"))
        assert ref is not None
        observer = await observe(here, ref)
        pid = await ref.ask(Pid())
    (down,) = await observer.ask(Observed(count=1))
    assert down.reason.kind in ("lost", "stopped")
    assert await gone(pid)
    assert await keeper.ask(WhereIs(name="p")) is None


async def test_the_loss_of_a_node_that_nobody_looks_at_is_its_parents_crash() -> None:
    with pytest.raises(NodeFailed, match="its node there is gone"):
        async with tcp_node("here") as here, tcp_node("there") as there:
            desk = await here.reach(there.endpoint)
            await here.spawn(spec(node=desk, restart="permanent"))
            there.kill()
            link = there.links.get(here.id)
            assert link is not None
            link.give_up("the machine is gone")
            await here.failed()


def test_a_machine_that_is_switched_off_takes_its_process_with_it() -> None:
    async def scenario(sim: Simulation) -> tuple[str, str]:
        root, machine = sim.host("root"), sim.host("machine")
        up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            async with sim.node("machine", machine) as node:
                up.set_result(await node.listen())
                await asyncio.Event().wait()

        async def ask() -> tuple[str, str]:
            async with sim.node("root", root) as node:
                desk = await node.reach(await up)
                ref = await node.spawn(spec(node=desk))
                observer = await observe(node, ref)
                assert await ref.ask(Add(amount=2)) == 2
                sim.power_off(machine)
                (down,) = await observer.ask(Observed(count=1), timeout_s=60.0)
                assert down.reason.cause is not None
                return down.reason.message, down.reason.cause.message

        sim.start(machine, serve())
        return await sim.start(root, ask())

    for seed in range(5):
        message, cause = Simulation(seed).run(scenario)
        assert message == "its node machine is gone"
        assert "no sign of life" in cause


def _pid(node: Node, ref: Ref) -> int:
    (process,) = (process for process in node.processes.all() if process.node_id == ref.node_id)
    carrier = process._carrier  # type: ignore[attr-defined]
    return int(carrier.pid)
