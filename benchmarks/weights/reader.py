"""`python -m benchmarks.weights.reader FOLDER SIZE DEVICE RANK WORLD ENDPOINT STORE`: a process that pulls.

Told `mapped` it reads the snapshot where it lies, into its own weights, as a rank on the core's host does;
`new`, into memory that is found for it, as an engine that wakes does; `tcp`, it brings it to its machine and
checks it, as a cell elsewhere does; `tcp_loaded`, it also reads that; `raw`, it copies as much; `broadcast`,
it receives as much."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.process import quiet
from benchmarks.weights.core import TOKEN, say
from benchmarks.weights.models import DTYPE, LARGE, layout_of, tensors
from benchmarks.weights.raw import Broadcast, RawCopy, store
from gyre.actors import Actor, ChildSpec, Node, Ref, run
from gyre.cell.far import Far
from gyre.cell.messages import GetSnapshot, Snapshot
from gyre.cell.page_lock import page_lock
from gyre.cell.weights import fill
from gyre.rdma import HeldRegions, Lending, SharedMemory


class Reader:
    """A rank of a cell, on the core's host and elsewhere."""

    def __init__(self, folder: Path, size: str, device: torch.device, rank: int) -> None:
        self._layout = layout_of(size)
        self._device = device
        here = folder / f"reader-{rank}"
        self.raw = RawCopy(SharedMemory(here), "raw", self._layout.nbytes, device)
        self._near = HeldRegions(SharedMemory(folder), page_lock(device))
        self.here = SharedMemory(here)
        self._far = HeldRegions(self.here, page_lock(device))
        alike = size in LARGE and device.type == "cpu"
        self._weights = tensors(self._layout, DTYPE, device, shared=alike)
        self.nbytes = self._layout.nbytes
        self.core: Ref
        self.far: Far
        self._get = GetSnapshot(cell=rank, kind="published")

    async def mapped(self) -> float:
        began = perf_counter()
        snapshot = await self.core.ask(self._get)
        self._load(self._near, snapshot)
        return perf_counter() - began

    async def new(self) -> float:
        """Not of what takes the memory back."""
        snapshot = await self.core.ask(self._get)
        self._weights = []
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        began = perf_counter()
        slots = self._layout.slots
        self._weights = [torch.empty(slot.shape, dtype=DTYPE, device=self._device) for slot in slots]
        self._load(self._near, snapshot)
        return perf_counter() - began

    async def tcp(self) -> float:
        began = perf_counter()
        snapshot = await self.far.pull(self._get)
        took_s = perf_counter() - began
        await self.far.free(snapshot)
        return took_s

    async def tcp_loaded(self) -> float:
        began = perf_counter()
        snapshot = await self.far.pull(self._get)
        self._load(self._far, snapshot)
        took_s = perf_counter() - began
        await self.far.free(snapshot)
        return took_s

    def _load(self, held: HeldRegions, snapshot: Snapshot) -> None:
        with held.open(snapshot.region) as source:
            shards = self._layout.shards(source.buffer)
            fill(self._weights, shards)
            del shards


async def serve(folder: str, size: str, device_name: str, rank: str, world: str, *core: str) -> None:
    endpoint, store_port = core
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    reader = Reader(Path(folder), size, device, int(rank))
    broadcast: Broadcast | None = None
    loop = asyncio.get_running_loop()
    async with Node(f"reader-{rank}", transport="tcp", token=TOKEN) as node:
        core_ref = await node.find("publisher", at=await node.reach(endpoint))
        assert core_ref is not None
        me = await node.spawn(ChildSpec(name="reader", start=Actor, restart="temporary"))
        lending = Lending(reader.here, node, "reader")
        reader.core, reader.far = core_ref, Far(lending, core_ref, me)
        say({})
        while order := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if order == "raw":
                seconds = reader.raw.from_host()
            elif order == "broadcast":
                if broadcast is None:
                    meeting = store(int(world), int(store_port))
                    broadcast = Broadcast(meeting, int(rank), int(world), device, reader.nbytes)
                seconds = broadcast.run()
            else:
                seconds = await getattr(reader, order)()
            say({"seconds": seconds})
        await lending.close()
    if broadcast is not None:
        broadcast.close()


if __name__ == "__main__":
    quiet()
    torch.set_num_threads(1)
    run(serve(*sys.argv[1:]))
