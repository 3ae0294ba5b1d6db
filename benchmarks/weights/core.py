"""`python -m benchmarks.weights.core FOLDER SIZE DEVICE WORLD`: the process that publishes.

Told `publish` it writes its fp32 weights as a snapshot, as the core's rank does; `fresh`, to memory that is
found for it, as each version once was; `raw`, it copies as much; `broadcast`, it sends as much."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from benchmarks.process import quiet
from benchmarks.weights.models import LARGE, layout_of, tensors
from benchmarks.weights.raw import Broadcast, RawCopy, store
from gyre.actors import Actor, ChildSpec, Node, handles, run
from gyre.cell.messages import GetSnapshot, ReleaseSnapshot, Snapshot
from gyre.cell.page_lock import page_lock
from gyre.cell.weights import fill
from gyre.rdma import Borrow, HeldRegions, Lending, Region, RegionHandle, SharedMemory, page_sum

TOKEN = b"no secret: all ends are of this benchmark"


class Publisher(Actor):
    """Leases its one snapshot, and lends it."""

    def __init__(self, folder: Path, size: str, device: torch.device) -> None:
        self.layout = layout_of(size)
        self.raw = RawCopy(SharedMemory(folder), "raw-core", self.layout.nbytes, device)
        self._shared = SharedMemory(folder)
        self._held = HeldRegions(self._shared, page_lock(device))
        alike = size in LARGE and device.type == "cpu"
        self._masters = tensors(self.layout, torch.float32, device, shared=alike)
        self.publish()
        with self._held.allocate("w0", self.layout.nbytes) as region:
            self._snapshot = Snapshot(
                version=0, region=region.handle, lease=1, checksum=page_sum(region.buffer)
            )

    def publish(self) -> float:
        began = perf_counter()
        with self._held.allocate("w0", self.layout.nbytes) as region:
            self._write(region)
        return perf_counter() - began

    def publish_fresh(self) -> float:
        began = perf_counter()
        with self._shared.allocate("fresh", self.layout.nbytes) as region:
            self._write(region)
        took_s = perf_counter() - began
        self._shared.free(region.handle)
        return took_s

    def _write(self, region: Region) -> None:
        shards = self.layout.shards(region.buffer)
        fill(shards, self._masters)

    async def started(self) -> None:
        self._lending = Lending(self._shared, self.context.node, self.context.name)

    async def stopping(self) -> None:
        await self._lending.close()

    @handles(GetSnapshot)
    async def get_snapshot(self, message: GetSnapshot) -> Snapshot:
        return self._snapshot

    @handles(ReleaseSnapshot)
    async def release_snapshot(self, message: ReleaseSnapshot) -> None:
        """It stays."""

    @handles(Borrow, concurrent=True)
    async def lend(self, message: Borrow) -> RegionHandle:
        return await self._lending.lend(message.region)


async def serve(folder: str, size: str, device_name: str, world: str) -> None:
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    publisher = Publisher(Path(folder), size, device)
    do = {
        "publish": publisher.publish,
        "fresh": publisher.publish_fresh,
        "raw": publisher.raw.to_host,
    }
    meeting = store(int(world)) if device.type == "cuda" else None
    broadcast: Broadcast | None = None
    loop = asyncio.get_running_loop()
    async with Node("core", transport="tcp", token=TOKEN) as node:
        await node.spawn(ChildSpec(name="publisher", start=lambda: publisher, restart="temporary"))
        say(
            {
                "endpoint": await node.listen(),
                "store": meeting.port if meeting is not None else 0,
                "nbytes": publisher.layout.nbytes,
            }
        )
        while order := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if order == "broadcast" and broadcast is None:
                broadcast = Broadcast(meeting, 0, int(world), device, publisher.layout.nbytes)
                do["broadcast"] = broadcast.run
            say({"seconds": do[order]()})
    if broadcast is not None:
        broadcast.close()


def say(what: dict[str, object]) -> None:
    os.write(1, msgspec.json.encode(what) + b"\n")


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    run(serve(*sys.argv[1:]))
