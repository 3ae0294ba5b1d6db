"""Processes that pull from a training core all the time, or copy as much without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from gyre.actors import Actor, Ask, Ref, handles
from gyre.cell.far import Far
from gyre.cell.messages import GetSnapshot, ReleaseSnapshot
from gyre.cell.page_lock import page_lock
from gyre.rdma import HeldRegions, Lending, RegionHandle, SharedMemory

Way = Literal["mapped", "tcp", "alone"]


class PullerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`here`: its own folder for regions, as that of another machine."""

    cell: int
    core: Ref
    shm: Path
    here: Path
    device: str


class Pull(Ask[int], frozen=True, kw_only=True):
    """Pull, again and again, until `Enough`: mapped, or by TCP; "alone", copy as many bytes of its own.
    Answers how often."""

    way: Way


class Enough(Ask[None], frozen=True, kw_only=True):
    """After the pull that is under way."""


class Puller(Actor):
    def __init__(self, config: PullerConfig) -> None:
        self._config = config
        self._device = torch.device(config.device)
        lock = page_lock(self._device)
        here = SharedMemory(config.here)
        self._near, self._own = HeldRegions(SharedMemory(config.shm), lock), HeldRegions(here, lock)
        self._here = here
        self._enough = False
        self._weights: torch.Tensor | None = None

    async def started(self) -> None:
        torch.set_num_threads(1)
        self._lending = Lending(self._here, self.context.node, self.context.name)
        self._far = Far(self._lending, self._config.core, self.context.ref)

    async def stopping(self) -> None:
        await self._lending.close()

    @handles(Pull, concurrent=True)
    async def pull(self, message: Pull) -> int:
        ways: dict[Way, Callable[[], Any]] = {"mapped": self._mapped, "tcp": self._tcp, "alone": self._alone}
        self._enough = False
        count = 0
        while not self._enough:
            await ways[message.way]()
            count += 1
        return count

    @handles(Enough, concurrent=True)
    async def enough(self, message: Enough) -> None:
        self._enough = True

    @property
    def _get(self) -> GetSnapshot:
        return GetSnapshot(cell=self._config.cell, kind="published", reader=self.context.ref)

    async def _mapped(self) -> None:
        snapshot = await self._config.core.ask(self._get)
        await asyncio.to_thread(self._load, self._near, snapshot.region)
        await self._config.core.tell(ReleaseSnapshot(lease=snapshot.lease))

    async def _tcp(self) -> None:
        snapshot = await self._far.pull(self._get)
        await asyncio.to_thread(self._load, self._own, snapshot.region)
        await self._far.free(snapshot)

    async def _alone(self) -> None:
        snapshot = await self._config.core.ask(self._get)
        with self._own.allocate("alone", snapshot.region.nbytes) as region:
            handle = region.handle
        await self._config.core.tell(ReleaseSnapshot(lease=snapshot.lease))
        await asyncio.to_thread(self._load, self._own, handle)

    def _load(self, held: HeldRegions, handle: RegionHandle) -> None:
        with held.open(handle) as source:
            data = torch.frombuffer(source.buffer, dtype=torch.uint8)
            if self._weights is None:
                self._weights = torch.empty_like(data, device=self._device)
            self._weights.copy_(data)
            del data
