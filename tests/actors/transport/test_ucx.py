"""What UCX does of its own, and what happens where it cannot be used."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time

import pytest
import structlog.testing

from gyre.actors import LinkLost, Node
from gyre.actors.transport import TransportUnusable, make_transport
from tests.actors.conftest import start
from tests.actors.test_links import TOKEN, carry
from tests.actors.transport.ends import End, Ends
from tests.actors.zoo import Add, Counter


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
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(1.0)
        assert (time.process_time() - cpu) / (time.monotonic() - began) < 0.01


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
    assert descriptors() == before
    host, _, port = rest.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


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
