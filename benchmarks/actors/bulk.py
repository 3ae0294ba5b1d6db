"""64 MiB from one process to another: as a Blob over TCP, and through shared memory on one host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks.actors.raw import Memcpy, raw_sender
from benchmarks.report import Report
from benchmarks.timing import Effort, Segment, rates
from gyre.actors import Actor, Ask, Blob, Node, ProcessSpec, Ref, handles

BYTES = 64 * 2**20
TCP_TO_RAW = 0.9
SHARED_TO_MEMCPY = 0.8


class Parcel(Ask[int], frozen=True, kw_only=True):
    """Answered with the sum of its bytes' number, the first and the last of them."""

    blob: Blob


class Receiver(Actor):
    """Has the bytes; what to do with them is no part of the transfer."""

    @handles(Parcel)
    async def parcel(self, message: Parcel) -> int:
        buffer = message.blob.buffer
        return len(buffer) + buffer[0] + buffer[-1]


async def bulk(report: Report, effort: Effort) -> None:
    nbytes = effort.count(BYTES)
    async with AsyncExitStack() as stack:
        tcp = await stack.enter_async_context(_receiver("bulk-tcp", shared_memory=False))
        shared = await stack.enter_async_context(_receiver("bulk-shared", shared_memory=True))
        raw = await stack.enter_async_context(raw_sender(nbytes))
        source = bytearray(b"\x03" * nbytes)
        source[0], source[-1] = 7, 11
        segments = [
            Segment("gyre.tcp", nbytes, lambda count: _send(tcp, source)),
            Segment("raw.tcp", nbytes, raw.run),
            Segment("gyre.shared", nbytes, lambda count: _send(shared, source)),
            Segment("memcpy", nbytes, Memcpy(nbytes).run),
        ]
        per_s = await rates(segments, effort.rounds)
    for name, rate in per_s.items():
        report.figure(f"bulk.{name}_gb_per_s", rate / 1e9)
    report.at_least("bulk.tcp_to_raw_ratio", per_s["gyre.tcp"] / per_s["raw.tcp"], TCP_TO_RAW)
    ratio = per_s["gyre.shared"] / per_s["memcpy"]
    report.at_least("bulk.shared_to_memcpy_ratio", ratio, SHARED_TO_MEMCPY)


@asynccontextmanager
async def _receiver(name: str, *, shared_memory: bool) -> AsyncIterator[Ref]:
    async with Node(name, transport="tcp", shared_memory=shared_memory) as node:
        yield await node.spawn(ProcessSpec(name="receiver", actor="benchmarks.actors.bulk:Receiver"))


async def _send(ref: Ref, source: bytearray) -> None:
    """Until the receiver has it all; that it is what was sent is checked on the way."""
    if await ref.ask(Parcel(blob=Blob(source))) != len(source) + 7 + 11:
        raise RuntimeError("other bytes arrived than were sent")
