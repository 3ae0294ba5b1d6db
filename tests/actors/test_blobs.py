"""Blobs over every transport: what a message promises holds for one with blobs too."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gyre.actors import (
    ActorDied,
    AskTimeout,
    BadMessage,
    Blob,
    MailboxFull,
    Node,
    ProcessSpec,
    Ref,
    SpawnFailed,
    ask_all,
    broadcast,
)
from gyre.actors.bulk import incoming as incoming_
from gyre.actors.transport import TransportName
from tests.actors.conftest import start
from tests.actors.test_links import Pair
from tests.actors.test_process import observe
from tests.actors.world import TRANSPORTS, World
from tests.actors.zoo import Add, Counter
from tests.actors.zoo_blobs import (
    Echo,
    Fill,
    Keep,
    Many,
    Note,
    Notes,
    Porter,
    PorterConfig,
    Pour,
    Put,
    Relay,
    Stall,
    Sum,
    pattern,
)

MIB = 2**20


@pytest.fixture(params=[*TRANSPORTS, "unix apart", "tcp apart"])
def world(request: pytest.FixtureRequest) -> World:
    """`apart`: as on two hosts, without shared memory."""
    return World(request.param.removesuffix(" apart"))


@pytest.fixture
async def pair(world: World, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = Pair(world)
    pair.a.shared_memory = not request.node.callspec.params["world"].endswith("apart")
    async with pair.a, pair.b:
        await pair.a.listen()
        await pair.b.listen()
        yield pair


async def until(holds: Callable[[], bool]) -> None:
    """Memory comes back on a later turn of the loop."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")


@pytest.mark.parametrize("nbytes", [0, 1, 65536, 65537, MIB, 3 * MIB + 5, 64 * MIB])
async def test_bytes_arrive_whole_both_ways(pair: Pair, nbytes: int) -> None:
    ref = pair.carry(await start(pair.b, Porter()))
    sent = pattern(nbytes)
    back = await ref.ask(Echo(blob=Blob(sent)))
    assert back.nbytes == len(back) == nbytes
    assert back.buffer == sent


async def test_a_message_has_many_of_them_and_other_fields(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Porter()))
    sizes = [0, 5, MIB, 70_000, 3, 2 * MIB]
    message = Many(
        blobs=[Blob(pattern(size)) for size in sizes], named={"x": Blob(b"abc")}, text="hi", maybe=None
    )
    got = await ref.ask(message)
    assert [bytes(blob.buffer) for blob in got.blobs] == [pattern(size) for size in sizes]
    assert (bytes(got.named["x"].buffer), got.text, got.maybe) == (b"abc", "hi", None)


async def test_many_small_ones(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Porter()))
    blobs = [Blob(pattern(1000 + i)) for i in range(500)]
    got = await ref.ask(Many(blobs=blobs, named={}, text="", maybe=None))
    assert [bytes(blob.buffer) for blob in got.blobs] == [bytes(blob.buffer) for blob in blobs]
    answers = await asyncio.gather(*(ref.ask(Sum(blob=Blob(pattern(100_000 + i)))) for i in range(100)))
    assert answers == [sum(pattern(100_000 + i)) for i in range(100)]


async def test_what_is_sent_later_to_the_same_actor_comes_later(pair: Pair) -> None:
    porter = Porter()
    ref = pair.carry(await start(pair.b, porter))
    for i in range(20):
        await ref.tell(Put(name=f"blob {i}", blob=Blob(pattern(MIB + i))))
        await ref.tell(Note(text=f"note {i}"))
    heard = await ref.ask(Notes())
    assert heard == [f"{kind} {i}" for i in range(20) for kind in ("blob", "note")]


async def test_other_actors_do_not_wait_for_it(pair: Pair) -> None:
    porter = Porter()
    ref = pair.carry(await start(pair.b, porter))
    other = pair.carry(await start(pair.b, Counter(), "other"))
    big = asyncio.create_task(ref.ask(Sum(blob=Blob(bytes(64 * MIB)))))
    await asyncio.sleep(0)
    assert await other.ask(Add(amount=1)) == 1
    assert not big.done()
    assert await big == 0


async def test_items_of_a_stream_in_order(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Porter()))
    sizes = [MIB + 1, 10, 2 * MIB, 0, 70_000] * 8
    got = [bytes(blob.buffer) async for blob in ref.stream(Pour(sizes=sizes))]
    assert got == [pattern(size) for size in sizes]


async def test_a_stream_goes_on_from_a_position(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_, "UNDER_WAY_BYTES", 2 * MIB)
    ref = pair.carry(await start(pair.b, Porter()))
    sizes = [MIB + i for i in range(12)]
    got = [blob.nbytes async for blob in ref.stream(Pour(sizes=sizes), position=3)]
    assert got == sizes[3:]
    await quiet(pair)


async def test_a_stream_that_is_closed_leaves_nothing(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Porter()))
    for _ in range(10):
        items = ref.stream(Pour(sizes=[2 * MIB] * 50))
        await anext(items)
        await items.aclose()
    await quiet(pair)
    assert (await ref.ask(Echo(blob=Blob(pattern(MIB))))).buffer == pattern(MIB)


async def quiet(pair: Pair) -> None:
    """Nothing is under way, nothing is waited for."""
    for node in (pair.a, pair.b):
        for link in node.links.all():
            freight = link.freight

            def empty(freight: object = freight) -> bool:
                inward, outward = freight.incoming, freight.outgoing  # type: ignore[attr-defined]
                return not (
                    inward.lanes
                    or inward._coming
                    or inward._loads
                    or outward._cargo
                    or outward._wanted
                    or outward._written
                    or outward.unshipped
                    or outward._waiting
                )

            await until(empty)


async def test_an_ask_cancelled_under_way_leaves_nothing(pair: Pair) -> None:
    porter = Porter()
    ref = pair.carry(await start(pair.b, porter))
    blob = Blob(pattern(8 * MIB))
    for turns in range(0, 60, 2):
        asked = asyncio.create_task(ref.ask(Echo(blob=blob)))
        for _ in range(turns):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
    await quiet(pair)
    assert (await ref.ask(Echo(blob=blob))).buffer == blob.buffer
    await quiet(pair)


async def test_a_deadline_holds_while_the_blob_waits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_, "UNDER_WAY_BYTES", 4 * MIB)
    porter = Porter()
    ref = pair.carry(await start(pair.b, porter))
    stalled = asyncio.create_task(ref.ask(Stall()))
    await porter.stalled.wait()
    first = asyncio.create_task(ref.ask(Sum(blob=Blob(bytes(3 * MIB)))))
    with pytest.raises(AskTimeout):
        await ref.ask(Sum(blob=Blob(bytes(3 * MIB))), timeout_s=0.2)
    porter.go_on.set()
    assert await first == 0
    await stalled
    await quiet(pair)


async def test_a_slow_actor_holds_back_who_tells_it_blobs(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming_, "UNDER_WAY_BYTES", 4 * MIB)
    porter = Porter()
    ref = pair.carry(await start(pair.b, porter))
    other = pair.carry(await start(pair.b, Porter(), "other"))
    await other.ask(Echo(blob=Blob(bytes(MIB))))
    stalled = asyncio.create_task(ref.ask(Stall()))
    await porter.stalled.wait()
    sent = 0
    with pytest.raises(MailboxFull):
        for sent in range(10):
            timeout_s = 1.0 if sent >= 3 else 20.0
            await ref.tell(Put(name=f"{sent}", blob=Blob(pattern(MIB))), timeout_s=timeout_s)
    assert 3 <= sent <= 5
    assert await other.ask(Sum(blob=Blob(bytes(3 * MIB)))) == 0, "another actor is not held back"
    porter.go_on.set()
    await stalled
    assert await ref.ask(Notes()) == [f"{i}" for i in range(sent)], "what was withdrawn does not come"
    await quiet(pair)


async def test_a_slow_consumer_holds_back_items(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_, "UNDER_WAY_BYTES", 4 * MIB)
    porter = Porter()
    ref = pair.carry(await start(pair.b, porter))
    items = ref.stream(Pour(sizes=[MIB] * 30))
    await anext(items)
    await asyncio.sleep(0.3)
    assert porter.poured <= 8
    assert len([item async for item in items]) == 29
    await quiet(pair)


async def test_too_much_is_refused_by_name(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.actors.bulk.outgoing.MAX_BLOBS_BYTES", MIB)
    ref = pair.carry(await start(pair.b, Porter()))
    with pytest.raises(BadMessage, match=r"1 blobs of 1048577 bytes in one message, 1024 of 1048576 allowed"):
        await ref.ask(Echo(blob=Blob(bytes(MIB + 1))))
    with pytest.raises(BadMessage, match="2000 blobs"):
        await ref.ask(Many(blobs=[Blob(b"")] * 2000, named={}, text="", maybe=None))
    with pytest.raises(BadMessage, match="blobs of 2097152 bytes"):
        await ref.ask(Fill(nbytes=2 * MIB))
    assert (await ref.ask(Echo(blob=Blob(bytes(MIB))))).nbytes == MIB
    await quiet(pair)


async def test_a_closed_blob_cannot_be_sent(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Porter()))
    blob = Blob(b"x")
    blob.close()
    with pytest.raises(BadMessage, match="closed"):
        await ref.ask(Echo(blob=blob))


async def test_a_peers_end_fails_what_is_under_way(pair: Pair) -> None:
    porter = Porter()
    ref = pair.carry(await start(pair.b, porter))
    await ref.ask(Echo(blob=Blob(bytes(MIB))))
    asks = [asyncio.create_task(ref.ask(Echo(blob=Blob(bytes(32 * MIB))))) for _ in range(3)]
    told = asyncio.create_task(ref.tell(Put(name="x", blob=Blob(bytes(32 * MIB)))))
    for _ in range(10):
        await asyncio.sleep(0)
    pair.b.links.close()
    for ask in asks:
        with pytest.raises(ActorDied, match="lost"):
            await ask
    await told
    assert (await ref.ask(Echo(blob=Blob(bytes(MIB))))).nbytes == MIB, "a new link has its own connections"
    await quiet(pair)


async def test_one_message_to_many(pair: Pair) -> None:
    porters = [Porter() for _ in range(3)]
    refs = [pair.carry(await start(pair.b, porter, f"p{i}")) for i, porter in enumerate(porters)]
    here = Porter()
    refs.append(await start(pair.a, here, "here"))
    await broadcast(refs, Keep(blob=Blob(pattern(MIB))))
    assert await ask_all(refs, Sum(blob=Blob(pattern(100_000)))) == [sum(pattern(100_000))] * 4
    assert [bytes(porter.kept[0].buffer) for porter in (*porters, here)] == [pattern(MIB)] * 4


async def test_a_dead_actor_is_no_place_for_a_blob(pair: Pair) -> None:
    ref = await start(pair.b, Porter())
    carried = pair.carry(ref)
    await pair.b.stop(ref)
    with pytest.raises(ActorDied):
        await carried.ask(Echo(blob=Blob(bytes(MIB))))
    await quiet(pair)


# --- memory --------------------------------------------------------------------------------------


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memfds() -> list[str]:
    """Shared memory that this process holds open or mapped."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps") as maps:
        links += maps.read().splitlines()
    return [link for link in links if "/memfd:gyre-" in link]


def named() -> set[str]:
    """Files of shared memory that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[5] for line in maps if " /dev/shm/" in line}


async def test_nothing_is_held_once_the_nodes_are_left(world: World) -> None:
    pair = Pair(world)
    async with pair.a, pair.b:
        await pair.a.listen()
        await pair.b.listen()
        ref = pair.carry(await start(pair.b, Porter()))
        assert (await ref.ask(Echo(blob=Blob(bytes(MIB))))).nbytes == MIB
    gc.collect()
    assert not memfds()


@pytest.mark.parametrize("world", ["unix"], indirect=True)
async def test_an_idle_actor_keeps_no_blob(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Porter()))
    await ref.ask(Sum(blob=Blob(bytes(MIB))))
    (link,) = pair.a.links.all()
    await until(lambda: not link.freight.shared._busy)


async def test_memory_and_descriptors_are_flat(pair: Pair) -> None:
    ref = pair.carry(await start(pair.b, Porter()))
    sent = pattern(2 * MIB)

    async def transfers(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            back = await ref.ask(Echo(blob=Blob(sent)))
            assert back.buffer[-5:] == sent[-5:]
        del back
        gc.collect()
        return rss_bytes(), len(os.listdir("/proc/self/fd")), mappings()

    rss, fds, maps = await transfers(30)
    rss_after, fds_after, maps_after = await transfers(200)
    assert rss_after < rss + 16 * MIB
    assert abs(fds_after - fds) <= 4
    assert abs(maps_after - maps) <= 20


async def test_what_was_made_of_a_buffer_keeps_its_memory(pair: Pair) -> None:
    numpy = pytest.importorskip("numpy")
    ref = pair.carry(await start(pair.b, Porter()))
    blob = await ref.ask(Echo(blob=Blob(pattern(MIB))))
    part = numpy.frombuffer(blob.buffer, dtype=numpy.uint8)[1000:2000]
    blob.close()
    with pytest.raises(ValueError, match="closed"):
        assert blob.buffer
    del blob
    gc.collect()
    for _ in range(10):
        await ref.ask(Echo(blob=Blob(bytes(MIB))))
    assert bytes(part) == pattern(MIB)[1000:2000]


async def test_blobs_that_are_kept_are_never_written_over(pair: Pair) -> None:
    porter = Porter()
    ref = pair.carry(await start(pair.b, porter))
    for i in range(80):  # more than there may be shared segments
        await ref.tell(Keep(blob=Blob(pattern(100_000 + i))))
    assert await ref.ask(Sum(blob=Blob(b"\1"))) == 1
    assert [bytes(blob.buffer) for blob in porter.kept] == [pattern(100_000 + i) for i in range(80)]


async def test_shared_memory_is_used_where_it_can_be(pair: Pair, request: pytest.FixtureRequest) -> None:
    ref = pair.carry(await start(pair.b, Porter()))
    await ref.ask(Sum(blob=Blob(bytes(MIB))))
    (link,) = pair.a.links.all()
    shares = pair.a.shared_memory and pair.a.transport.scheme not in ("memory", "sim")
    assert bool(link.freight.shared._last) == shares
    assert link.freight.attached == (not shares)


async def test_a_peer_that_cannot_open_a_segment_gets_it_over_the_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(*_: object) -> None:
        raise OSError("another host")

    monkeypatch.setattr(incoming_, "open_segment", elsewhere)
    ref = pair.carry(await start(pair.b, Porter()))
    for i in range(3):
        assert (await ref.ask(Echo(blob=Blob(pattern(MIB + i))))).buffer == pattern(MIB + i)
    (link,) = pair.a.links.all()
    assert not link.freight.shared._busy


# --- in one node, and by itself --------------------------------------------------------------------


async def test_in_one_node_it_is_passed_as_it_is(node: Node) -> None:
    ref = await start(node, Porter())
    blob = Blob(bytearray(10))
    assert await ref.ask(Echo(blob=blob)) is blob


def test_what_is_no_buffer_is_named() -> None:
    with pytest.raises(TypeError, match="a str is no buffer"):
        Blob("text")
    with pytest.raises(ValueError, match="contiguous"):
        Blob(memoryview(b"abcdef")[::2])


def test_its_buffer_is_bytes_and_read_only() -> None:
    numpy = pytest.importorskip("numpy")
    blob = Blob(numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
    assert (blob.nbytes, blob.buffer.format, blob.buffer.readonly) == (24, "B", True)
    assert repr(blob) == "Blob(24 bytes)"
    assert Blob(numpy.empty((0, 3))).nbytes == 0


async def test_a_blob_is_no_part_of_a_configuration(tmp_path: Path) -> None:
    async with Node(name="a") as node:
        spec = ProcessSpec(
            name="p",
            actor="tests.actors.zoo_blobs:Porter",
            config=Many(blobs=[Blob(b"x")], named={}, text="", maybe=None),
        )
        with pytest.raises(SpawnFailed, match="a Blob cannot travel in a Many"):
            await node.spawn(spec)


# --- between processes -----------------------------------------------------------------------------


def porter(**options: object) -> ProcessSpec:
    return ProcessSpec(
        name="porter",
        actor="tests.actors.zoo_blobs:Porter",
        config=PorterConfig(),
        restart="temporary",
        **options,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("shared", [True, False])
async def test_between_processes(transport: TransportName, shared: bool) -> None:
    async with Node(name="root", transport=transport, shared_memory=shared) as node:
        ref = await node.spawn(porter())
        for size in (10, MIB, 64 * MIB):
            blob = Blob(pattern(size))
            assert (await ref.ask(Echo(blob=blob))).buffer == blob.buffer


@pytest.mark.parametrize("shared", [True, False])
async def test_a_process_killed_under_a_transfer_fails_it_with_the_cause(shared: bool) -> None:
    async with Node(name="root", shared_memory=shared) as node:
        ref = await node.spawn(porter())
        await observe(node, ref)
        await ref.ask(Echo(blob=Blob(bytes(MIB))))
        (process,) = node.processes.all()
        asks = [asyncio.create_task(ref.ask(Echo(blob=Blob(bytes(48 * MIB))))) for _ in range(3)]
        await asyncio.sleep(0.005)
        os.kill(process._carrier.pid, signal.SIGKILL)
        # On a busy machine the first may be over.
        failed = [e for e in await asyncio.gather(*asks, return_exceptions=True) if not isinstance(e, Blob)]
        assert failed
        assert all(isinstance(error, ActorDied) and "SIGKILL" in str(error) for error in failed)
        await process.ended
        await until(lambda: not memfds())


async def test_nothing_is_left_of_a_sender_that_was_killed(tmp_path: Path) -> None:
    """The receiver still reads what it has, which has no name in the file system."""
    before = named()
    async with Node(name="root") as node:
        ref = await node.spawn(porter())
        await observe(node, ref)
        (process,) = node.processes.all()
        blob = await ref.ask(Fill(nbytes=8 * MIB))
        os.kill(process._carrier.pid, signal.SIGKILL)
        await process.ended
        assert blob.buffer == pattern(8 * MIB)
        assert memfds()
        assert named() <= before


async def test_a_blob_goes_on_to_a_third(tmp_path: Path) -> None:
    async with Node(name="root") as node:
        first: Ref = await node.spawn(porter())
        home = await start(node, Porter(), "home")
        got = await first.ask(Relay(to=home, blob=Blob(pattern(2 * MIB))))
        assert got == sum(pattern(2 * MIB))
