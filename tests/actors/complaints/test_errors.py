"""Complaints of errors that lose their meaning, and of cancels and time-outs that get lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter as Tally
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog.testing

from gyre.actors import Actor, Ask, AskTimeout, ChildSpec, Node, ProcessSpec, Ref, RemoteError, handles
from gyre.actors.testing import Simulation
from tests.actors.conftest import start
from tests.actors.pairs import Two, two_nodes
from tests.actors.test_links import carry
from tests.actors.zoo import Add, Bump, Counter


class HeldElsewhere(Exception):
    """Cannot be made again from its `args`, nor pickled."""

    def __init__(self, *, path: str, holder: int) -> None:
        super().__init__(f"{path} is held by {holder}")
        self.lock = threading.Lock()


class TakeLock(Ask[None], frozen=True, kw_only=True):
    path: str


class Locker(Actor):
    @handles(TakeLock)
    async def take(self, message: TakeLock) -> None:
        raise HeldElsewhere(path=message.path, holder=7) from OSError("busy")


class Forward(Ask[int], frozen=True, kw_only=True):
    """Asked on along `path`; the last hangs."""

    path: tuple[Ref, ...]


class Forwarder(Actor):
    @handles(Forward)
    async def forward(self, message: Forward) -> int:
        if not message.path:
            await asyncio.Event().wait()
        return await message.path[0].ask(Forward(path=message.path[1:]), timeout_s=0.3)


@pytest.fixture
async def pair() -> AsyncIterator[Two]:
    async with two_nodes("unix") as two:
        yield two


async def test_an_error_with_a_constructor_of_its_own_comes_through(node: Node) -> None:
    """The caller got `TypeError: __init__() missing ...` instead of the error (ray#34797, ray#49885)."""
    spec = ProcessSpec(name="locker", actor="tests.actors.complaints.test_errors:Locker")
    locker = await node.spawn(spec)
    with pytest.raises(RemoteError, match="/tmp/x is held by 7") as caught:
        await locker.ask(TakeLock(path="/tmp/x"))
    assert caught.value.type_name == "tests.actors.complaints.test_errors:HeldElsewhere"
    assert "in take" in caught.value.traceback
    assert "OSError: busy" in caught.value.traceback


def test_wait_for_which_swallows_a_cancel_is_banned() -> None:
    """`asyncio.wait_for` returns a result that came in the tick of a cancel, which is lost (gh-86296)."""
    for code, banned in (("wait_for(x(), 1)", True), ("timeout(1)", False)):
        ruff = [Path(sys.executable).with_name("ruff"), "check", "--stdin-filename", "gyre/actors/x.py", "-"]
        text = f"import asyncio\n\n\nasync def main() -> None:\n    asyncio.{code}\n"
        done = subprocess.run(
            ruff, input=text, text=True, capture_output=True, timeout=60, cwd=Path(__file__).parents[3]
        )
        assert ("TID251" in done.stdout) is banned, done.stdout + done.stderr


async def test_a_cancel_in_the_turn_of_the_answer_is_kept(node: Node) -> None:
    """The same in our own ask: who is cancelled as the answer comes is cancelled (cpython gh-86296)."""
    ref = await start(node, Counter())
    cancelled = 0
    for turns in range(8):
        asking = asyncio.ensure_future(ref.ask(Add(amount=1)))
        for _ in range(turns):
            await asyncio.sleep(0)
        if asking.cancel():
            await asyncio.wait([asking])
            assert asking.cancelled(), f"after {turns} turns"
            cancelled += 1
    assert cancelled >= 2


@pytest.mark.parametrize("far", [False, True])
async def test_ten_thousand_undelivered_messages_are_few_lines(pair: Two, far: bool) -> None:
    """ "message not delivered ... abandoned" was repeated for 30 s over the root error (torchforge#505)."""
    ref = await start(pair.b, Counter())
    await pair.b.stop(ref)
    to = pair.carry(ref) if far else ref
    with structlog.testing.capture_logs() as logs:
        for number in range(10_000):
            await to.tell(Bump(amount=number))
        other = pair.carry(await start(pair.b, Counter(), "other"))
        await other.ask(Add(amount=1))
    assert pair.b.dead_letters.count == 10_000
    assert len(pair.b.dead_letters.last) == 100
    lines = [line for line in logs if line["event"] == "dead_letters"]
    assert 1 <= len(lines) <= 20
    assert lines[0]["count"] == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_of_nested_calls_that_time_out_the_innermost_is_named(depth: int) -> None:
    """Time-outs of nested calls fired in random order, so that any of them was blamed (monarch#1858)."""
    blamed: Tally[str] = Tally()

    async def scenario(sim: Simulation) -> None:
        hosts = [sim.host("left"), sim.host("right")]
        nodes = [sim.node(host.name, host) for host in hosts]
        everywhere = [sim.loop.create_future() for _ in hosts]
        over = asyncio.Event()

        async def side(index: int) -> None:
            async with nodes[index] as node:
                await node.listen()
                refs = [
                    await node.spawn(ChildSpec(name=f"at-{at}", start=Forwarder)) for at in range(index, 4, 2)
                ]
                everywhere[index].set_result(refs)
                if index:
                    await over.wait()
                    return
                others = [carry(ref, nodes[1], node) for ref in await everywhere[1]]
                path = [ref for both in zip(refs, others, strict=True) for ref in both]
                await node.links.to(path[1]).opened.wait()  # a call that dials has less time than it thinks
                try:
                    await path[0].ask(Forward(path=tuple(path[1 : depth + 1])), timeout_s=0.3)
                except (AskTimeout, RemoteError) as error:
                    blamed[str(error).partition("#1 did not answer")[0].rpartition(" ")[2]] += 1
                over.set()

        await asyncio.wait([sim.start(host, side(index)) for index, host in enumerate(hosts)])

    for seed in range(30):
        Simulation(seed).run(scenario)
    assert blamed == {f"at-{depth}": 30}
