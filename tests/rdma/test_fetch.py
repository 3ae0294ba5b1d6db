"""Regions that are copied to another machine: two nodes with a folder each."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gyre.actors import Actor, ActorDied, Blob, ChildSpec, Node, Ref, RemoteError, handles
from gyre.rdma import ReadRegion, RegionError, RegionHandle, SharedMemory, fetch, read
from gyre.rdma.fetch import CHUNK_BYTES

TOKEN = b"the token of these nodes"


class Holder(Actor):
    """`extra` bytes more than it should, or less."""

    def __init__(self, shared: SharedMemory, extra: int = 0) -> None:
        self._shared = shared
        self._extra = extra

    @handles(ReadRegion)
    async def read_region(self, message: ReadRegion) -> AsyncIterator[Blob]:
        async for chunk in read(self._shared, message.region):
            yield Blob(chunk.buffer[: len(chunk) + min(self._extra, 0)])
        if self._extra > 0:
            yield Blob(b"x" * self._extra)


@asynccontextmanager
async def holder(there: SharedMemory, extra: int = 0) -> AsyncIterator[tuple[Node, Ref, Node]]:
    """A node of the reader, the holder as it sees it, and the holder's node."""
    async with (
        Node("far", transport="tcp", token=TOKEN) as far,
        Node("near", transport="tcp", token=TOKEN) as near,
    ):
        await far.spawn(ChildSpec(name="holder", start=lambda: Holder(there, extra), restart="temporary"))
        ref = await near.find("holder", at=await near.reach(await far.listen()))
        assert ref is not None
        yield near, ref, far


@pytest.fixture
def there(tmp_path: Path) -> SharedMemory:
    return SharedMemory(tmp_path / "there")


@pytest.fixture
def here(tmp_path: Path) -> SharedMemory:
    return SharedMemory(tmp_path / "here")


def written(there: SharedMemory, content: bytes) -> RegionHandle:
    with there.allocate("w1", len(content)) as region:
        region.buffer[:] = content
        return region.handle


@pytest.mark.parametrize("nbytes", [1, CHUNK_BYTES, 3 * CHUNK_BYTES + 17])
async def test_a_copy_has_the_same_bytes(there: SharedMemory, here: SharedMemory, nbytes: int) -> None:
    content = os.urandom(nbytes)
    region = written(there, content)
    async with holder(there) as (_, ref, _):
        copy = await fetch(region, ref, here, "copy")
    assert (copy.name, copy.nbytes) == ("copy", nbytes)
    with here.open(copy) as opened:
        assert bytes(opened.buffer) == content


@pytest.mark.parametrize(
    ("extra", "why"), [(5, "more than its 100 bytes came"), (-1, "99 of its 100 bytes came")]
)
async def test_more_or_less_than_its_bytes_is_an_error_and_no_copy_stays(
    there: SharedMemory, here: SharedMemory, tmp_path: Path, extra: int, why: str
) -> None:
    region = written(there, bytes(100))
    async with holder(there, extra) as (_, ref, _):
        with pytest.raises(RegionError, match=why):
            await fetch(region, ref, here, "copy")
    assert list((tmp_path / "here").iterdir()) == []


async def test_a_region_that_is_gone_is_an_error(
    there: SharedMemory, here: SharedMemory, tmp_path: Path
) -> None:
    region = written(there, bytes(100))
    there.free(region)
    async with holder(there) as (_, ref, _):
        with pytest.raises(RemoteError, match="region w1: is gone"):
            await fetch(region, ref, here, "copy")
    assert list((tmp_path / "here").iterdir()) == []


async def test_a_holder_that_dies_is_an_error(
    there: SharedMemory, here: SharedMemory, tmp_path: Path
) -> None:
    region = written(there, bytes(100))
    async with holder(there) as (_, ref, far):
        local = far.lookup("holder")
        assert local is not None
        await far.stop(local)
        with pytest.raises(ActorDied):
            await fetch(region, ref, here, "copy")
    assert list((tmp_path / "here").iterdir()) == []
