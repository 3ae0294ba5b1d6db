"""A process that reads the core's snapshots, and may be killed at it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from gyre.actors import Actor, Ask, Ref, handles
from gyre.cell.far import Far
from gyre.cell.messages import GetSnapshot, SnapshotKind
from gyre.rdma import HeldRegions, Lending, SharedMemory


class ReaderConfig(msgspec.Struct, frozen=True, kw_only=True):
    cell: int
    core: Ref
    shm: Path
    here: Path
    nbytes: int


class Map(Ask[bytes], frozen=True, kw_only=True):
    """Lease and map a snapshot, and go on reading it. Answers its first bytes."""

    kind: SnapshotKind


class Copy(Ask[int], frozen=True, kw_only=True):
    """Pull a snapshot over TCP, load and release it. Answers its version."""

    kind: SnapshotKind


class GetPid(Ask[int], frozen=True, kw_only=True):
    """Of the process."""


class Reader(Actor):
    def __init__(self, config: ReaderConfig) -> None:
        self._config = config
        self._held = HeldRegions(SharedMemory(config.shm))

    async def started(self) -> None:
        self._lending = Lending(SharedMemory(self._config.here), self.context.node, self.context.name)
        self._far = Far(self._lending, self._config.core, self.context.ref)
        await self._far.memory(self._config.nbytes)

    async def stopping(self) -> None:
        await self._lending.close()

    @handles(Map)
    async def map(self, message: Map) -> bytes:
        snapshot = await self._config.core.ask(self._get(message.kind))
        return bytes(self._held.open(snapshot.region).buffer[:4])

    @handles(Copy)
    async def copy(self, message: Copy) -> int:
        snapshot = await self._far.pull(self._get(message.kind))
        await self._far.free(snapshot)
        return snapshot.version

    @handles(GetPid)
    async def pid(self, message: GetPid) -> int:
        return os.getpid()

    def _get(self, kind: SnapshotKind) -> GetSnapshot:
        return GetSnapshot(cell=self._config.cell, kind=kind, reader=self.context.ref)
