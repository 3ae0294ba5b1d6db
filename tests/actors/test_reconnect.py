"""Links that end on one side first: nothing of the old one is taken after it, and the next is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gyre.actors import Node
from gyre.actors.wire import ASK, TELL, Request
from tests.actors.conftest import start
from tests.actors.test_links import TOKEN, carry
from tests.actors.zoo import Add, Bump, Counter


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node]]:
    """By id: the first is the smaller, whose dial wins when both dial."""
    async with (
        Node(name="a", node_id="a" * 16, transport="tcp", token=TOKEN) as a,
        Node(name="b", node_id="b" * 16, transport="tcp", token=TOKEN) as b,
    ):
        await a.listen()
        await b.listen()
        yield a, b


async def test_what_comes_over_a_link_that_was_given_up_is_not_taken(nodes: tuple[Node, Node]) -> None:
    """Else a message of before would come after those of the next connection."""
    a, b = nodes
    counter = Counter()
    ref = await start(b, counter)
    carried = carry(ref, b, a)
    await carried.ask(Add(amount=1))
    (old,) = b.links.all()
    received = old._received
    b.links.on_lost(old, "given up")
    for number, kind in enumerate((TELL, ASK), 1):
        message = Bump(amount=100) if kind == TELL else Add(amount=100)
        name = f"tests.actors.zoo:{type(message).__name__}"
        frame = Request(received + number, kind, 7, ref.id, 0, 0, 1.0, 0, 0, (), name, message)  # type: ignore[arg-type]
        old.received(memoryview(a.codec.encode(frame)))
    assert await ref.ask(Add(amount=0)) == 1
    assert old.incoming == {}


@pytest.mark.parametrize("dials_first", ["a", "b"])
async def test_a_link_that_only_one_side_has_lost_is_made_anew(
    nodes: tuple[Node, Node], dials_first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other end, which dialled it, still thinks that it is open."""
    a, b = nodes
    monkeypatch.setattr("gyre.actors.links.CROSSED_WAIT_S", 0.05)
    there, here = await start(b, Counter()), await start(a, Counter())
    near, far = (a, b) if dials_first == "a" else (b, a)
    to_far = carry(there if far is b else here, far, near)
    to_near = carry(here if far is b else there, near, far)
    await to_far.ask(Add(amount=1))
    (link,) = far.links.all()
    assert not link.dialled
    # The far end gives the connection up; nothing of that reaches the near one until it says something.
    channel = link._channel
    far.links.on_lost(link, "no sign of life")
    asked = asyncio.ensure_future(to_near.ask(Add(amount=1), timeout_s=10.0))
    await asyncio.sleep(0.1)
    assert channel is not None
    channel.abort()
    async with asyncio.timeout(9):
        assert await asked == 1
    assert len(a.links.all()) == len(b.links.all()) == 1
