"""Signs of life on links to other machines."""

from __future__ import annotations

import asyncio

import pytest

from gyre.actors import Node, Ref
from gyre.actors.link import MISSED_BEATS
from tests.actors.conftest import start
from tests.actors.test_links import TOKEN, carry
from tests.actors.zoo import Add, Counter

FAST_S = 0.05


async def _frames(a: Node, ref: Ref, for_s: float) -> int:
    """Sent over the link of `a` while nobody asks."""
    link = a.links.to(ref)
    before = link._sent
    await asyncio.sleep(for_s)
    return link._sent - before


@pytest.mark.parametrize(("asker_s", "asked_s"), [(FAST_S, 60.0), (60.0, FAST_S)])
async def test_a_peer_that_beats_slower_is_not_taken_for_dead(asker_s: float, asked_s: float) -> None:
    async with (
        Node("a", transport="tcp", token=TOKEN, heartbeat_s=asker_s) as a,
        Node("b", transport="tcp", token=TOKEN, heartbeat_s=asked_s) as b,
    ):
        await b.listen()
        ref = carry(await start(b, Counter()), b, a)
        assert await ref.ask(Add(amount=1)) == 1
        link = a.links.to(ref)
        await asyncio.sleep(FAST_S * (MISSED_BEATS + 1) * 3)
        assert a.links.to(ref) is link
        assert link.gone is None
        assert await ref.ask(Add(amount=1)) == 2


async def test_beats_are_not_answered_without_end() -> None:
    async with (
        Node("a", transport="tcp", token=TOKEN, heartbeat_s=FAST_S) as a,
        Node("b", transport="tcp", token=TOKEN, heartbeat_s=FAST_S) as b,
    ):
        await b.listen()
        ref = carry(await start(b, Counter()), b, a)
        assert await ref.ask(Add(amount=1)) == 1
        assert 0 < await _frames(a, ref, FAST_S * 10) <= 30
