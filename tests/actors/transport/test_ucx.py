"""What UCX does of its own, and what happens where it cannot be used."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import structlog.testing

from gyre.actors import ActorDied, LinkLost, Node, ProcessSpec
from gyre.actors.framing import header
from gyre.actors.transport import CLOSED, TransportUnusable, make_transport
from gyre.actors.transport.ucx import GREETING, TRUNCATED
from gyre.actors.transport.ucx_worker import UcxWorker
from tests.actors.conftest import start
from tests.actors.test_links import TOKEN, carry
from tests.actors.transport.ends import End, Ends
from tests.actors.zoo import Add, Count, Counter, CounterConfig, Hang, Pid


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "carrier-pigeon")


@pytest.mark.parametrize(
    ("fault", "why", "fix"),
    [
        ("missing", "ucxx cannot be imported", "pip install 'gyre[ucx]'"),
        ("broken", "UCX does not start: No such device", "UCX_TLS"),
    ],
)
async def test_where_it_cannot_be_used_a_line_says_why_and_tcp_is(
    request: pytest.FixtureRequest, fault: str, why: str, fix: str
) -> None:
    request.getfixturevalue(fault)
    with structlog.testing.capture_logs() as logs:
        async with (
            Node(name="a", transport="ucx", token=TOKEN) as a,
            Node(name="b", transport="tcp", token=TOKEN) as b,
        ):
            assert (await a.listen()).startswith("tcp:127.0.0.1:")
            await b.listen()
            ref = carry(await start(b, Counter()), b, a)
            assert await ref.ask(Add(amount=1)) == 1
    assert [line["event"] for line in logs] == ["transport_unusable"]
    assert logs[0]["transport"] == "ucx"
    assert logs[0]["used"] == "tcp"
    assert why in logs[0]["why"]
    assert fix in logs[0]["fix"]


async def test_who_lacks_it_cannot_reach_who_listens_on_it_and_learns_why(missing: None) -> None:
    async with Node(name="a", transport="tcp", token=TOKEN) as a:
        with pytest.raises(LinkLost, match=r"cannot reach 'ucx:h:1': .*pip install 'gyre\[ucx\]'"):
            await a.dial("ucx:h:1", End())


@pytest.mark.parametrize("scheme", ["tcp", "ucx"])
async def test_nobody_waits_for_an_endpoint_that_is_no_address(scheme: str) -> None:
    async with Node(name="a", transport="ucx", token=TOKEN) as a:
        for rest in ("", "h", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", "127.0.0.1:-1"):
            with pytest.raises(LinkLost, match="cannot reach"):
                await a.dial(f"{scheme}:{rest}", End())


async def test_an_idle_connection_takes_no_cpu() -> None:
    async with Ends("ucx") as ends:
        await ends.dial()
        await asyncio.sleep(0.1)
        shares = []
        for _ in range(10):  # at best: other threads of this process may have work
            began, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(1.0)
            shares.append((time.process_time() - cpu) / (time.monotonic() - began))
            if shares[-1] < 0.01:
                return
        raise AssertionError(f"shares of a CPU: {shares}")


async def test_a_transport_that_is_closed_leaves_no_descriptor_and_its_port_is_free() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    rest, before = "", 0
    for turn in range(5):
        async with Ends("ucx") as ends:
            await ends.dial()
            mine, _ = await ends.dial()
            mine.channel.abort()
            rest = ends.rest
        before = descriptors() if turn == 0 else before
    assert descriptors() <= before
    host, _, port = rest.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


async def test_processes_live_and_die_as_over_other_transports() -> None:
    async with Node(name="a", transport="ucx") as node:
        spec = {
            "actor": "tests.actors.zoo:Counter",
            "config": CounterConfig(start=10),
            "restart": "temporary",
        }
        first = await node.spawn(ProcessSpec(name="first", **spec))  # type: ignore[arg-type]
        second = await node.spawn(ProcessSpec(name="second", **spec))  # type: ignore[arg-type]
        assert first.endpoint.startswith("ucx:")
        assert await first.ask(Add(amount=1)) == 11
        assert [item async for item in second.stream(Count(upto=300))] == [*range(300)]
        hanging = asyncio.create_task(first.ask(Hang()))
        os.kill(await second.ask(Pid()), signal.SIGKILL)
        with pytest.raises(ActorDied, match="SIGKILL"):
            await second.ask(Add(amount=1))
        assert not hanging.done(), "who lives is not disturbed"
    with pytest.raises(ActorDied):
        await hanging


def chunk(*payloads: bytes) -> bytes:
    framed = b"".join(header(len(payload)) + payload for payload in payloads)
    return header(len(framed)) + framed


class Stranger:
    """Speaks UCX, and sends what it likes."""

    def __init__(self, rest: str) -> None:
        self.worker = UcxWorker("lo")
        host, _, port = rest.rpartition(":")
        self.endpoint = self.worker.connect(host, int(port))
        self.sent: list[object] = []

    async def send(self, data: bytes) -> None:
        from ucxx._lib.arr import Array

        request = self.endpoint.stream_send(Array(data))
        self.sent.append((request, data))
        async with asyncio.timeout(20):
            while not request.completed:
                self.worker.soon()
                await asyncio.sleep(0.001)

    async def hang_up(self) -> None:
        self.worker.part(self.endpoint, idle=True)
        await self.worker.close()


async def test_a_peer_that_ends_at_any_byte_leaves_whole_frames_and_one_reason() -> None:
    words = GREETING + chunk(b"one", b"") + chunk(b"three") + header(0)
    async with Ends("ucx") as ends:
        for length in range(1, len(words) + 1):
            stranger = Stranger(ends.rest)
            await stranger.send(words[:length])
            if length < len(GREETING):
                await stranger.hang_up()
                assert ends.accepted.empty()
                continue
            async with asyncio.timeout(20):
                end = await ends.accepted.get()
            await asyncio.sleep(0.01)
            await stranger.hang_up()
            assert await end.lost_why() in (CLOSED, TRUNCATED)
            assert end.heard == [b"one", b"", b"three"][: len(end.heard)]
        assert end.heard == [b"one", b"", b"three"]
        assert end.lost_with == [CLOSED]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (header(2**31), "2147483644 bytes, 262144 allowed"),
        (chunk(b"fine", bytes(4097)), "a frame of 4097 bytes, 4096 allowed"),
        (chunk(b"fine") + b"\xff" * 64, "4294967291 bytes"),
    ],
)
async def test_a_peer_that_misbehaves_is_cut_off(words: bytes, why: str) -> None:
    async with Ends("ucx") as ends:
        stranger = Stranger(ends.rest)
        await stranger.send(GREETING + words)
        async with asyncio.timeout(20):
            end = await ends.accepted.get()
        await asyncio.sleep(0.05)
        await stranger.hang_up()
        assert why in await end.lost_why()
        mine, theirs = await ends.dial()
        mine.channel.send(b"others go on")
        assert await theirs.next() == b"others go on"


@pytest.mark.parametrize("seed", range(10))
async def test_garbage_does_no_harm(seed: int) -> None:
    """From a peer that speaks UCX, and from one that does not."""
    rng = random.Random(seed)
    async with Ends("ucx") as ends:
        stranger = Stranger(ends.rest)
        await stranger.send(rng.choice((b"", GREETING)) + rng.randbytes(rng.randrange(1, 3000)))
        host, _, port = ends.rest.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(rng.randbytes(3000))
        await asyncio.sleep(0.02)
        writer.close()
        await stranger.hang_up()
        mine, theirs = End(), End()
        (await ends.dialler.dial(ends.rest, mine)).send(b"others go on")
        while theirs.heard != [b"others go on"]:
            async with asyncio.timeout(20):
                theirs = await ends.accepted.get()
            await asyncio.wait(
                [asyncio.ensure_future(theirs.next()), asyncio.ensure_future(theirs.lost_why())],
                return_when=asyncio.FIRST_COMPLETED,
            )


FORKED = """
import asyncio, os, sys
from gyre.actors.transport import TransportUnusable, make_transport
from tests.actors.transport.ends import Ends

async def main():
    async with Ends("ucx") as ends:
        mine, theirs = await ends.dial()
        child = os.fork()
        if child == 0:
            try:
                make_transport("ucx")
            except TransportUnusable as error:
                os.write(1, str(error).encode())
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        mine.channel.send(b"still here")
        assert await theirs.next() == b"still here"

asyncio.run(main())
"""


def test_a_forked_process_is_told_and_does_its_parent_no_harm() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "was forked from one that uses it" in done.stdout


def test_the_reason_is_in_the_error_too(broken: None) -> None:
    with pytest.raises(TransportUnusable, match="transport 'ucx' cannot be used: UCX does not start"):
        make_transport("ucx")
