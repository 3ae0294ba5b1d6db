"""Where a cell's ranks meet, also after the store died. Over a store process as in a job."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from gyre.actors import AskTimeout, AwaitChild, ChildSpec, Node, ProcessSpec, Ref, Supervisor
from gyre.cell.store import GetStoreAddress, Rendezvous, StoreConfig

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[Ref]:
    store = ProcessSpec(
        name="store",
        actor="gyre.cell.store:StoreActor",
        config=StoreConfig(),
        log_path=tmp_path / "store.log",
    )
    async with Node(name="test") as node:
        yield await node.spawn(ChildSpec(name="stores", start=lambda: Supervisor([store])))


async def test_no_two_groups_meet_under_one_prefix(stores: Ref) -> None:
    rendezvous = Rendezvous(stores, "cell1/life2", 60.0)
    groups = [await rendezvous.next_group() for _ in range(2)]
    assert [group.prefix for group in groups] == ["cell1/life2/group1", "cell1/life2/group2"]
    with socket.create_connection((groups[0].host, groups[0].port), timeout=5.0):
        pass


async def test_a_group_waits_for_a_store_that_died(stores: Ref) -> None:
    rendezvous = Rendezvous(stores, "cell1/life1", 60.0)
    before = await rendezvous.next_group()
    (pid,) = _children()
    os.kill(pid, signal.SIGKILL)
    after = await rendezvous.next_group()
    assert after.port != before.port
    assert after.prefix == "cell1/life1/group2"


async def test_a_store_that_never_comes_is_an_error(stores: Ref) -> None:
    store = await stores.ask(AwaitChild(name="store"))
    await store.ask(GetStoreAddress(), timeout_s=60.0)
    (pid,) = _children()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises((TimeoutError, AskTimeout)):
            await Rendezvous(stores, "cell1/life1", 0.2).next_group()
    finally:
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0)


def _children() -> list[int]:
    """Of this node: other tests may have left processes of theirs for those that come."""
    pids = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
    found = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if b"gyre.actors.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found
