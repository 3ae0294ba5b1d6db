"""What every transport does, without nodes. Nodes on every transport: test_links.py."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import os
import random
from collections.abc import AsyncIterator

import pytest

from gyre.actors.errors import BadMessage, LinkLost
from gyre.actors.transport import CLOSED
from tests.actors.transport.ends import End, Ends
from tests.actors.world import World

MIB = 2**20
# Around what is written at once, and what is joined with others.
SIZES = (0, 1, 3, 4, 5, 4095, 4096, 65_536, *range(MIB // 4 - 9, MIB // 4 + 2), MIB)


@pytest.fixture
async def ends(world: World) -> AsyncIterator[Ends]:
    await once(world.kind)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    async with Ends(world.kind) as ends:
        yield ends
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
    if world.kind == "ucx":  # those of the others are closed by their loop
        assert len(os.listdir("/proc/self/fd")) <= before


@functools.cache
def seen(kind: str) -> set[str]:
    return set()


async def once(kind: str) -> None:
    """The first connection of a process opens what the later ones share."""
    if not seen(kind):
        seen(kind).add(kind)
        async with Ends(kind) as ends:
            await ends.meet_and_part()


def noise(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


async def test_frames_of_any_size_arrive_whole_and_in_order_both_ways(ends: Ends) -> None:
    mine, theirs = await ends.dial(limit_bytes=MIB)
    frames = [noise(size, size) for size in random.Random(1).sample(SIZES * 2, len(SIZES) * 2)]
    for frame in frames:
        mine.channel.send(frame)
        theirs.channel.send(frame[::-1])
    for frame in frames:
        assert await theirs.next() == frame
        assert await mine.next() == frame[::-1]


async def test_many_frames_of_one_turn(ends: Ends) -> None:
    mine, theirs = await ends.dial()
    frames = [b"%d" % number for number in range(5000)]
    for frame in frames:
        mine.channel.send(frame)
    assert [await theirs.next() for _ in frames] == frames


async def test_question_and_answer(ends: Ends) -> None:
    mine, theirs = await ends.dial()
    for number in range(200):
        mine.channel.send(b"%d?" % number)
        assert await theirs.next() == b"%d?" % number
        theirs.channel.send(b"%d!" % number)
        assert await mine.next() == b"%d!" % number


async def test_a_frame_of_the_limit_passes_and_one_over_it_ends_the_connection(ends: Ends) -> None:
    for limit_bytes, over in ((4096, 4097), (4096, MIB), (MIB, MIB + 1), (0, 1)):
        mine, theirs = await ends.dial(limit_bytes)
        mine.channel.send(bytes(limit_bytes))
        assert await theirs.next() == bytes(limit_bytes)
        mine.channel.send(bytes(over))
        mine.channel.send(b"")
        assert f"a frame of {over} bytes, " in await theirs.lost_why()
        assert await mine.lost_why()
        assert theirs.heard == [bytes(limit_bytes)]


async def test_before_a_peer_is_known_its_frames_are_small(ends: Ends) -> None:
    mine, theirs = await ends.dial()
    assert mine.channel.limit_bytes == theirs.channel.limit_bytes == 4096


async def test_a_slow_reader_holds_the_writer_back(ends: Ends) -> None:
    mine, theirs = await ends.dial(limit_bytes=MIB)
    frames = 0
    while mine.channel.writable and frames < 1024:
        mine.channel.send(b"%08d" % frames + bytes(65_528))
        frames += 1
    assert (frames < 1024) == (ends.world.kind != "memory"), "what is in memory waits at the other end"
    async with asyncio.timeout(20):
        await mine.channel.drain()
    assert mine.channel.writable
    mine.channel.send(b"after")
    assert [int((await theirs.next())[:8]) for _ in range(frames)] == [*range(frames)]
    assert await theirs.next() == b"after"


async def test_a_writer_that_waits_for_a_peer_that_goes_is_released(ends: Ends) -> None:
    mine, theirs = await ends.dial(limit_bytes=MIB)
    for _ in range(1024):
        if mine.channel.writable:
            mine.channel.send(bytes(65_536))
    theirs.channel.abort()
    async with asyncio.timeout(20):
        await mine.channel.drain()
    await mine.lost_why()


async def test_what_was_sent_before_a_close_arrives_before_it(ends: Ends) -> None:
    for count, size in ((0, 0), (1, 0), (1, 100), (500, 100), (32, MIB // 4)):
        for closes in (0, 1):
            pair = await ends.dial(limit_bytes=MIB)
            closer, other = pair[closes], pair[1 - closes]
            frames = [noise(number, size) for number in range(count)]
            for frame in frames:
                closer.channel.send(frame)
            closer.channel.close()
            closer.channel.send(b"too late")
            assert await other.lost_why() == CLOSED
            assert await closer.lost_why() == CLOSED
            assert other.heard == frames


async def test_who_closes_hears_nothing_more(ends: Ends) -> None:
    for closes in (0, 1):
        pair = await ends.dial()
        pair[closes].channel.close()
        pair[1 - closes].channel.send(b"nobody listens")
        await pair[closes].lost_why()
        assert pair[closes].heard == []


async def test_an_abort_ends_both(ends: Ends) -> None:
    mine, theirs = await ends.dial()
    mine.channel.abort()
    assert await mine.lost_why()
    assert await theirs.lost_why() == CLOSED
    mine.channel.send(b"too late")
    theirs.channel.send(b"too late")
    for end in (mine, theirs):
        end.channel.close()
        end.channel.abort()
        async with asyncio.timeout(20):
            await end.channel.drain()
    assert mine.heard == theirs.heard == []


@pytest.mark.parametrize("how", [*itertools.product(("close", "abort"), repeat=2)])
async def test_both_end_it_at_once(ends: Ends, how: tuple[str, str]) -> None:
    for _ in range(10):
        both = await ends.dial()
        for end, ending in zip(both, how, strict=True):
            end.channel.send(b"last")
            getattr(end.channel, ending)()
            end.channel.close()
        for end in both:
            assert await end.lost_why()


@pytest.mark.parametrize("error", [BadMessage, LinkLost])
async def test_what_a_receiver_refuses_ends_it_with_its_reason(ends: Ends, error: type[Exception]) -> None:
    mine, theirs = await ends.dial()
    theirs.deaf = error("no sense in it")
    for number in range(10):
        mine.channel.send(b"%d" % number)
    theirs.channel.send(b"the last word")
    assert await theirs.lost_why() == "no sense in it"
    assert await mine.lost_why()


async def test_who_listens_is_reached_by_many_at_once_and_each_has_its_own(ends: Ends) -> None:
    mine = [End() for _ in range(20)]
    async with asyncio.timeout(20):
        channels = await asyncio.gather(*(ends.dialler.dial(ends.rest, end) for end in mine))
        theirs = [await ends.accepted.get() for _ in mine]
    for number, (end, channel) in enumerate(zip(mine, channels, strict=True)):
        end.channel = channel
        channel.send(b"%d" % number)
    for end in theirs:
        end.channel.send(b"you are " + await end.next())
    assert [await end.next() for end in mine] == [b"you are %d" % number for number in range(20)]
    mine[3].channel.close()
    await mine[3].lost_why()
    mine[4].channel.send(b"go on")
    await asyncio.gather(*(end.next() for end in theirs if end.heard == [b"4"]))
    assert sum(bool(end.lost_with) for end in theirs) == 1


async def test_nobody_is_there(ends: Ends) -> None:
    mine, theirs = await ends.dial()
    ends.listener.close()
    await asyncio.sleep(0.02)
    for _ in range(3):
        stranger = End()
        with pytest.raises((OSError, LinkLost)):
            await ends.dialler.dial(ends.rest, stranger)
        assert stranger.lost_with == [], "who never had a channel loses none"
    mine.channel.send(b"we go on")
    assert await theirs.next() == b"we go on"


async def test_a_dial_that_is_given_up_leaves_nothing(ends: Ends) -> None:
    for turns in range(12):
        mine = End()
        dial = asyncio.ensure_future(ends.dialler.dial(ends.rest, mine))
        for _ in range(turns):
            await asyncio.sleep(0)
        dial.cancel()
        await asyncio.wait([dial])
        if not dial.cancelled():
            dial.result().close()
    mine = End()
    (await ends.dialler.dial(ends.rest, mine)).send(b"hello")

    async def greet_all() -> None:
        while True:
            (await ends.accepted.get()).channel.send(b"welcome")

    greeter = asyncio.create_task(greet_all())
    assert await mine.next() == b"welcome"
    greeter.cancel()
    await asyncio.wait([greeter])


async def test_they_come_and_go_and_leave_no_descriptor(ends: Ends) -> None:
    await ends.meet_and_part()
    gc.collect()  # of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await ends.meet_and_part()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_its_end_does_not_wait_for_those_who_never_close(ends: Ends) -> None:
    """Both transports are left with open connections between them."""
    await ends.dial()
    mine, theirs = await ends.dial()
    mine.channel.send(b"hello")
    assert await theirs.next() == b"hello"
    mine.channel.close()
    theirs.channel.close()


def test_endpoints_say_by_which_transport(world: World) -> None:
    assert world.transport("a").scheme == {"simulated": "sim"}.get(world.kind, world.kind)
