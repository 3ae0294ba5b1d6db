"""KV that outlives a SGLang server: its hierarchical cache writes through to a folder in memory, where the
servers of other cells on the host find it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from gyre.cell.config import SglangConfig
from gyre.cell.engine import sglang_site
from gyre.cell.engine.base import Weights
from gyre.cell.engine.sglang_launch import Served
from gyre.cell.engine.sglang_site.gyre_pages import Fence
from gyre.cell.engine.sglang_weights import Delivery, Load, Thread

# Of the pool in host memory, through which all KV goes, to the one on the device. Older servers want more
# of it than of the other.
HOST_TO_DEVICE = 1.25
# A shorter prefix is computed as fast as it is looked for.
LEAST_PAGES = 4
SITE = str(Path(sglang_site.__file__).parent)


class KvStorage:
    """That of one server: pages in `folder`, which servers share, a fence in `scratch`, which is its own."""

    def __init__(self, folder: Path, scratch: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._fence_path = scratch / "kv-version"
        self._limit_bytes = limit_bytes
        self._fence = Fence(self._fence_path)

    def configured(self, config: SglangConfig, served: Served) -> SglangConfig:
        """What starts a server that uses it; the job's own arguments win. Until it has weights nothing is
        kept or found, whatever the server before it had. ValueError for a server of many ranks: nothing
        tells when all of them have dropped what they had of older weights."""
        self._fence.shut()
        if served.ranks > 1:
            raise ValueError("KV of a SGLang server over many GPUs cannot be kept: set kv_storage_bytes = 0")
        extra = {
            "backend_name": "gyre",
            "module_path": "gyre_hicache",
            "class_name": "GyrePages",
            "interface_v1": 1,
            "prefetch_threshold": LEAST_PAGES * served.block_tokens,
            "folder": str(self._folder),
            "fence": str(self._fence_path),
            "model": f"{served.model_folder} {served.dtype}",
            "limit_bytes": self._limit_bytes,
        }
        arguments = (
            "--enable-hierarchical-cache",
            "--hicache-write-policy=write_through",
            f"--hicache-ratio={HOST_TO_DEVICE:g}",
            "--hicache-io-backend=direct",
            "--hicache-mem-layout=page_first_direct",
            "--hicache-storage-backend=dynamic",
            "--hicache-storage-prefetch-policy=wait_complete",
            f"--hicache-storage-backend-extra-config={json.dumps(extra)}",
        )
        path = os.pathsep.join(filter(None, (SITE, config.environment.get("PYTHONPATH"))))
        return msgspec.structs.replace(
            config,
            arguments=(*arguments, *config.arguments),
            environment=config.environment | {"PYTHONPATH": path},
        )

    def fenced(self, delivery: Delivery, thread: Thread) -> Delivery:
        return Fenced(delivery, self._fence, thread)


class Fenced:
    """No page of KV is moved while weights change: what a server has when they have come is empty, and of
    them."""

    def __init__(self, delivery: Delivery, fence: Fence, thread: Thread) -> None:
        self._delivery = delivery
        self._fence = fence
        self._thread = thread

    @asynccontextmanager
    async def read(self, weights: Weights) -> AsyncIterator[Load]:
        async with self._delivery.read(weights) as taken:

            async def load() -> None:
                await self._thread.run(self._fence.shut)
                await taken()
                await self._thread.run(self._fence.open, weights.version)

            yield load
