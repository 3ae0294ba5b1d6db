"""Regions of another machine: copied in chunks, beside the actors' messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from gyre.actors import Blob, Ref, Stream
from gyre.rdma.base import RegionError, RegionHandle, Regions

CHUNK_BYTES = 1024 * 1024


class ReadRegion(Stream[Blob], frozen=True, kw_only=True):
    """To an actor on the machine that has the region: its bytes, in order."""

    region: RegionHandle


async def read(backend: Regions, region: RegionHandle) -> AsyncIterator[Blob]:
    """What a handler of ReadRegion answers. Raises RegionError."""
    with backend.open(region) as source:
        for at in range(0, region.nbytes, CHUNK_BYTES):
            # A copy, because the mapping may be gone before it has left.
            yield Blob(bytes(source.buffer[at : at + CHUNK_BYTES]))


async def fetch(region: RegionHandle, holder: Ref, into: Regions, name: str) -> RegionHandle:
    """A copy here, as `name`, of a region that `holder` can read. Raises RegionError, and what a stream
    raises; then nothing is left of the copy."""
    with into.allocate(name, region.nbytes) as copy:
        try:
            at = 0
            async with aclosing(holder.stream(ReadRegion(region=region))) as chunks:
                async for chunk in chunks:
                    if at + len(chunk) > region.nbytes:
                        raise RegionError(region.name, f"more than its {region.nbytes} bytes came")
                    copy.buffer[at : at + len(chunk)] = chunk.buffer
                    at += len(chunk)
            if at < region.nbytes:
                raise RegionError(region.name, f"{at} of its {region.nbytes} bytes came")
        except BaseException:
            into.free(copy.handle)
            raise
        return copy.handle
