"""One suite for every transport: two nodes in one process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import structlog.testing

from gyre.actors import (
    ActorDied,
    AskTimeout,
    BadMessage,
    MailboxFull,
    Node,
    Ref,
    RemoteError,
    UnhandledMessage,
    WouldDeadlock,
)
from gyre.actors.flow import CREDIT
from gyre.actors.framing import header
from gyre.actors.handshake import NONCE_BYTES, DiallerHandshake, Peer
from gyre.actors.streams import WINDOW_ITEMS
from tests.actors.conftest import life, start
from tests.actors.world import World
from tests.actors.zoo import (
    Add,
    AddToPeer,
    Asleep,
    Bump,
    Cat,
    Circle,
    Count,
    Counter,
    CounterConfig,
    Crash,
    Dancer,
    Dog,
    GoRound,
    Hang,
    Hold,
    Observe,
    Observed,
    Observer,
    Overflow,
    Pet,
    Raise,
    Shop,
    Slow,
    Total,
    Unheard,
    Wrong,
)

TOKEN = b"secret" * 6


class Pair:
    """Two nodes; `carry` takes a Ref of `b` to `a`. `node` makes another of their kind."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.a = self.node("a")
        self.b = self.node("b")

    def node(self, name: str, token: bytes = TOKEN) -> Node:
        return Node(name=name, transport=self._world.transport(name), token=token)

    def carry(self, ref: Ref) -> Ref:
        return carry(ref, self.b, self.a)


def carry(ref: Ref, owner: Node, to: Node) -> Ref:
    carried: Ref = to.codec.decode(Ref, msgspec.Raw(owner.codec.encode(ref)))
    return carried


@pytest.fixture
async def pair(world: World) -> AsyncIterator[Pair]:
    pair = Pair(world)
    async with pair.a, pair.b:
        await pair.a.listen()
        await pair.b.listen()
        yield pair


async def test_ask_and_tell_in_order(pair: Pair) -> None:
    counter = Counter()
    ref = pair.carry(await start(pair.b, counter))
    for i in range(200):
        await ref.tell(Bump(amount=i))
    assert await ref.ask(Add(amount=1)) == sum(range(200)) + 1
    assert counter.seen == [f"bump {i}" for i in range(200)]


async def test_many_asks_at_once(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Counter()))
    answers = await asyncio.gather(*(ref.ask(Add(amount=1)) for _ in range(500)))
    assert answers == [*range(1, 501)]


async def test_answers_are_decoded_as_the_message_says(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Shop()))
    assert await ref.ask(Pet(which="cat", owner=ref)) == Cat(lives=9, owner=ref)
    dog = await ref.ask(Pet(which="dog", data=b"\0", path=Path("/x"), sizes={"a": (1, 2)}))
    assert dog == Dog(name="/x b'\\x00' {'a': (1, 2)}")
    assert await ref.ask(Pet(which="")) is None


async def test_refs_in_messages_work_where_they_arrive(pair: Pair) -> None:
    home = await start(pair.a, Counter())
    counter = Counter(CounterConfig(peer=carry(home, pair.a, pair.b)))
    ref = pair.carry(await start(pair.b, counter))
    assert await ref.ask(AddToPeer(amount=5)) == 5
    assert await home.ask(Add(amount=0)) == 5


async def test_a_ref_that_comes_home_is_local(pair: Pair) -> None:
    home = await start(pair.b, Counter())
    assert carry(pair.carry(home), pair.a, pair.b).target is life(home)


async def test_errors_keep_their_meaning(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Shop()))
    with pytest.raises(RemoteError) as caught:
        await ref.ask(Raise(which="other"))
    assert caught.value.type_name == "KeyError"
    assert "in oops" in caught.value.traceback
    with pytest.raises(Overflow) as overflow:
        await ref.ask(Raise(which="overflow"))
    assert (overflow.value.tokens, overflow.value.window, str(overflow.value)) == (9, 8, "9 > 8")
    with pytest.raises(Asleep, match="zzz"):
        await ref.ask(Raise(which="asleep"))


async def test_bad_messages_and_answers_are_named(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Shop()))
    with pytest.raises(UnhandledMessage, match="Shop does not handle"):
        await ref.ask(Unheard())
    with pytest.raises(BadMessage, match=r"what a#1 answered to Wrong is not its type: Expected `int`"):
        await ref.ask(Wrong())
    with pytest.raises(BadMessage, match=r"this is no Pet: .*which"):
        await ref.ask(Pet(which=7))  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="cannot travel"):
        await ref.ask(Pet(which=object()))  # type: ignore[arg-type]
    assert await ref.ask(Pet(which="")) is None


async def test_a_message_over_the_bound_is_refused_by_the_sender(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Shop()))
    with pytest.raises(BadMessage, match="use a Blob"):
        await ref.ask(Pet(which="dog", data=bytes(65 * 2**20)))
    assert await ref.ask(Pet(which="")) is None


async def test_a_big_message_passes_whole(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Shop()))
    data = bytes(range(256)) * 2**13
    dog = await ref.ask(Pet(which="dog", data=data))
    assert isinstance(dog, Dog)
    assert len(dog.name) > len(data)


async def test_a_deadline_cancels_the_handler_over_there(pair: Pair) -> None:
    counter = Counter()
    ref = pair.carry(await start(pair.b, counter))
    await ref.ask(Add(amount=0))
    for timeout_s in (0.05, 0.5, 5.0):  # on a busy machine it may be over before it is there
        with pytest.raises(AskTimeout):
            await ref.ask(Hang(), timeout_s=timeout_s)
        if counter.hanging.is_set():
            break
    assert await ref.ask(Add(amount=1)) == 1
    assert counter.seen == ["hang ended"]
    assert pair.a.links.all()[0].pending == {}
    assert pair.b.links.all()[0].incoming == {}


async def test_cancelling_an_ask_cancels_the_handler_over_there(pair: Pair) -> None:
    counter = Counter()
    ref = pair.carry(await start(pair.b, counter))
    asked = asyncio.create_task(ref.ask(Hang()))
    await counter.hanging.wait()
    asked.cancel()
    await asyncio.wait([asked])
    assert await ref.ask(Add(amount=1)) == 1
    assert counter.seen == ["hang ended"]


async def test_cycles_over_nodes_are_named(pair: Pair) -> None:
    there = await start(pair.b, Dancer(), "there")
    here = await start(pair.a, Dancer(), "here")
    await here.tell(Circle(next=pair.carry(there)))
    await there.tell(Circle(next=carry(here, pair.a, pair.b)))
    async with asyncio.timeout(20):
        with pytest.raises(WouldDeadlock, match=r"^here#1 -> there#1 -> here#1$"):
            await here.ask(GoRound())


async def test_streams(pair: Pair) -> None:
    counter = Counter()
    ref = pair.carry(await start(pair.b, counter))
    assert [item async for item in ref.stream(Count(upto=300))] == [*range(300)]
    got = []
    with pytest.raises(RemoteError, match="at 3"):
        async for item in ref.stream(Count(upto=9, fail_at=3)):
            got.append(item)
    assert got == [0, 1, 2]


async def test_a_slow_consumer_holds_the_producer_back(pair: Pair) -> None:
    counter = Counter()
    ref = pair.carry(await start(pair.b, counter))
    async with contextlib.aclosing(ref.stream(Count(upto=10_000))) as items:
        assert await anext(items) == 0
        await asyncio.sleep(0.05)
        assert counter.produced <= WINDOW_ITEMS + 1
    await counter.hanging.wait()
    assert counter.seen == ["count closed"]


async def test_a_dropped_stream_ends_the_handler(pair: Pair) -> None:
    counter = Counter()
    ref = pair.carry(await start(pair.b, counter))
    async for _ in ref.stream(Count(upto=10_000)):
        break
    gc.collect()
    async with asyncio.timeout(20):
        await counter.hanging.wait()


async def test_monitors(pair: Pair) -> None:
    observer = await start(pair.a, Observer(), "observer")
    watcher_there = await start(pair.b, Observer(), "watcher")
    ref = await start(pair.b, Counter())
    await watcher_there.tell(Observe(ref=ref))
    await observer.tell(Observe(ref=pair.carry(ref)))
    await pair.carry(ref).ask(Add(amount=1))
    await ref.tell(Crash(text="bang"))
    (down,) = await observer.ask(Observed(count=1))
    assert down.ref == ref
    assert down.reason.message == "bang"
    await observer.tell(Observe(ref=pair.carry(ref)))
    _, again = await observer.ask(Observed(count=2))
    assert again.reason.message == "bang"


async def test_the_dead_over_there_are_dead_at_once(pair: Pair) -> None:
    ref = await start(pair.b, Counter())
    carried = pair.carry(ref)
    await carried.ask(Add(amount=1))
    await pair.b.stop(ref)
    with pytest.raises(ActorDied, match="a#1 died: stopped"):
        await carried.ask(Add(amount=1))
    with pytest.raises(ActorDied):
        await anext(carried.stream(Count(upto=1)))
    await carried.tell(Bump())
    with pytest.raises(ActorDied):
        await carried.ask(Add(amount=1))
    assert pair.b.dead_letters.count == 1


async def test_a_mailbox_over_there_holds_its_writers_back(pair: Pair) -> None:
    slow = Slow()
    ref = await start(pair.b, slow)
    carried = pair.carry(ref)
    await pair.carry(await start(pair.b, Counter(), "other")).ask(Add(amount=0))  # the link is open
    await carried.tell(Hold())
    with pytest.raises(MailboxFull):
        for _ in range(2 * CREDIT):
            await carried.tell(Bump(), timeout_s=0.1)
    assert len(life(ref).mailbox.queue) <= CREDIT
    slow.gate.set()
    await carried.tell(Bump())
    assert await carried.ask(Total()) == CREDIT


async def test_a_full_mailbox_blocks_only_those_who_write_to_it(pair: Pair) -> None:
    slow = Slow()
    carried = pair.carry(await start(pair.b, slow))
    other = pair.carry(await start(pair.b, Counter(), "other"))
    await carried.tell(Hold())
    writer = asyncio.create_task(write(carried, 2 * CREDIT))
    assert await other.ask(Add(amount=1)) == 1
    await other.tell(Bump())
    assert not writer.done()
    slow.gate.set()
    await writer
    assert await carried.ask(Total()) == 2 * CREDIT


async def write(ref: Ref, count: int) -> None:
    for _ in range(count):
        await ref.tell(Bump())


async def test_nothing_is_kept_of_those_who_came_and_went(pair: Pair) -> None:
    for i in range(20):
        ref = await start(pair.b, Counter(), f"a{i}")
        await pair.carry(ref).ask(Add(amount=1))
        await pair.b.stop(ref)
    other = pair.carry(await start(pair.b, Counter(), "other"))
    await other.ask(Add(amount=1))
    assert len(pair.a.links.all()[0].flows) == 1
    assert pair.b.links.all()[0]._taken == {} or len(pair.b.links.all()[0]._taken) == 1


async def test_one_connection_when_both_dial_at_once(pair: Pair) -> None:
    there = pair.carry(await start(pair.b, Counter()))
    here = carry(await start(pair.a, Counter()), pair.a, pair.b)
    answers = await asyncio.gather(*(ref.ask(Add(amount=1)) for ref in (there, here) for _ in range(5)))
    assert answers == [1, 2, 3, 4, 5] * 2
    assert len(pair.a.links.all()) == len(pair.b.links.all()) == 1


async def test_a_peers_end_fails_everything_at_once(pair: Pair) -> None:
    counter = Counter()
    async with pair.node("c") as c:
        await c.listen()
        ref = carry(await start(c, counter), c, pair.a)
        observer = await start(pair.a, Observer(), "observer")
        await observer.tell(Observe(ref=ref))
        hanging = asyncio.create_task(ref.ask(Hang()))
        items = ref.stream(Count(upto=1000))
        await anext(items)
        await counter.hanging.wait()
        c.links.close()
        with pytest.raises(ActorDied, match="a#1 died: lost"):
            await hanging
        with pytest.raises(ActorDied):
            async for _ in items:
                pass
        (down,) = await observer.ask(Observed(count=1))
        assert down.reason.kind == "lost"
        assert await ref.ask(Add(amount=1)) == 1, "a new connection is made when it is needed"
    with pytest.raises(ActorDied, match=r"a#1 died: lost"):
        await ref.ask(Add(amount=1))


async def test_an_askers_end_cancels_its_handlers(pair: Pair) -> None:
    counter = Counter()
    ref = await start(pair.b, counter)
    async with pair.node("c") as c:
        await c.listen()
        asked = asyncio.create_task(carry(ref, pair.b, c).ask(Hang()))
        await counter.hanging.wait()
    with pytest.raises(ActorDied):
        await asked
    assert await ref.ask(Add(amount=1)) == 1
    assert counter.seen == ["hang ended"]


async def test_another_token_is_refused(pair: Pair) -> None:
    ref = await start(pair.b, Counter())
    async with pair.node("c", token=b"other") as c:
        await c.listen()
        with pytest.raises(ActorDied, match="wrong token"):
            await carry(ref, pair.b, c).ask(Add(amount=1))
    assert await pair.carry(ref).ask(Add(amount=1)) == 1


# --- what strangers send ------------------------------------------------------------------------


@pytest.fixture
async def listening() -> AsyncIterator[Node]:
    async with Node(name="b", transport="tcp", token=TOKEN) as node:
        await node.listen()
        yield node


def framed(payload: bytes) -> bytes:
    return header(len(payload)) + payload


async def stranger(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    _, host, port = node.endpoint.split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes, 4096 allowed"),
        (framed(b"xxxx"), "not a handshake"),
        (b"\0\0", "it closed within a frame"),
    ],
)
async def test_a_stranger_is_refused_with_one_line(listening: Node, sent: bytes, why: str) -> None:
    with structlog.testing.capture_logs() as logs:
        reader, writer = await stranger(listening)
        writer.write(sent)
        writer.write_eof()
        await reader.read()
        writer.close()
        await asyncio.sleep(0.01)
    assert [line["event"] for line in logs] == ["peer_refused"]
    assert why in logs[0]["why"]


async def authenticated(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await stranger(node)
    handshake = DiallerHandshake(TOKEN, Peer("f" * 16, "stranger", ""), b"n" * NONCE_BYTES)
    hello = handshake.hello()
    writer.write(framed(hello))
    proof = handshake.on_hello(memoryview(await read_frame(reader)))
    writer.write(framed(proof))
    handshake.on_verdict(memoryview(await read_frame(reader)))
    return reader, writer


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (framed(b"xxxx"), "not a frame"),
        ((64 * 2**20 + 1).to_bytes(4, "big"), "67108864 allowed"),
        (2 * framed(b"\x93\x06\x01\x05"), "replayed"),
        (framed(b"\x93\x06\x02\x05"), "frame 2 where 1 belongs"),
        (b"\0\0\0\x09half", "it closed within a frame"),
    ],
)
async def test_a_peer_that_misbehaves_is_cut_off_with_one_line(
    listening: Node, sent: bytes, why: str
) -> None:
    with structlog.testing.capture_logs() as logs:
        reader, writer = await authenticated(listening)
        writer.write(sent)
        writer.write_eof()
        await reader.read()
        writer.close()
        await asyncio.sleep(0.01)
    assert [line["event"] for line in logs] == ["link_lost"]
    assert why in logs[0]["why"]
    assert listening.links.all() == []


async def test_the_folder_of_sockets_is_private_and_goes_away() -> None:
    async with Node(name="a") as node:
        path = (await node.listen()).removeprefix("unix:")
        folder = os.path.dirname(path)
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert os.listdir(folder) == [os.path.basename(path)]
    assert os.path.basename(folder) not in os.listdir(os.path.dirname(folder))
