"""`python -m benchmarks.rdma [--json] [--quick] [--only BACKEND,...] [--mib 256] [--block-kib 1024]`."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.actors.raw import Memcpy, raw_sender
from benchmarks.command import chosen, parser, tell
from benchmarks.process import companion, quiet
from benchmarks.rdma.backends import NAMES, made
from benchmarks.report import Report
from benchmarks.timing import FULL, QUICK, Effort, Segment, rates
from gyre.actors import run
from gyre.rdma import Backend, Extent, RegionHandle, Registration, Unusable

ON_CPU = ("shm", "tcp", "ucx", "mooncake", "nixl")
TO_RAW = 0.8
CUDA_IPC_GB_PER_S = 200.0
ROUNDS = 10


@dataclass(frozen=True)
class Way:
    """A backend here, its memory, and a region of the same kind in another process."""

    backend: Backend
    local: Registration
    remote: RegionHandle
    extents: list[Extent]

    async def read(self, count: int) -> None:
        await self.backend.read(self.local, self.remote, self.extents)

    async def write(self, count: int) -> None:
        await self.backend.write(self.local, self.remote, self.extents)


@asynccontextmanager
async def way(name: str, nbytes: int, block_bytes: int, folder: Path) -> AsyncIterator[Way]:
    """Every second block of its region is moved, in no order: as the KV of a session lies in a pool. Raises
    Unusable."""
    backend = made(name, folder, 0)
    blocks = list(range(0, 2 * nbytes, 2 * block_bytes))
    random.Random(1).shuffle(blocks)
    extents = [Extent(at * block_bytes, block, block_bytes) for at, block in enumerate(blocks)]
    device = _devices() - 1 if name == "cuda_ipc" else 0
    arguments = (name, str(folder), str(2 * nbytes), str(device))
    async with companion("benchmarks.rdma.holder", *arguments) as process:
        remote = msgspec.convert(process.hello, RegionHandle)
        await backend.start()
        try:
            yield Way(backend, await backend.allocate("local", nbytes), remote, extents)
        finally:
            await backend.close()


def _devices() -> int:
    import torch

    return torch.cuda.device_count()


async def measure(
    report: Report, console: Console, *, names: list[str], effort: Effort, nbytes: int, block_bytes: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm") as folder:
        async with AsyncExitStack() as stack:
            raw = await stack.enter_async_context(raw_sender(nbytes))
            segments = [
                Segment("memcpy", nbytes, Memcpy(nbytes).run),
                Segment("raw_tcp", nbytes, raw.run),
            ]
            for name in names:
                console.print(f"{name} ...")
                try:
                    it = await stack.enter_async_context(way(name, nbytes, block_bytes, Path(folder)))
                except Unusable as error:
                    report.unmet(f"{name}_can_be_used", ">=", 1, str(error))
                    continue
                await it.read(nbytes)  # mapped, connected and learned once
                segments.append(Segment(f"{name}.read", nbytes, it.read))
                segments.append(Segment(f"{name}.write", nbytes, it.write))
            per_s = await rates(segments, effort.rounds)
    for name, rate in per_s.items():
        report.figure(f"{name}_gb_per_s", rate / 1e9)
    gates(report, per_s)


def gates(report: Report, per_s: dict[str, float]) -> None:
    for name, raw in (("shm", "memcpy"), ("tcp", "raw_tcp")):
        for op in ("read", "write"):
            if f"{name}.{op}" in per_s:
                report.at_least(f"{name}.{op}_to_{raw}_ratio", per_s[f"{name}.{op}"] / per_s[raw], TO_RAW)
    if "cuda_ipc.read" in per_s:
        report.at_least("cuda_ipc.read_gb_per_s", per_s["cuda_ipc.read"] / 1e9, CUDA_IPC_GB_PER_S)


def main() -> None:
    line = parser("rdma", "Reads and writes between two processes, by each backend.")
    line.add_argument("--only", help=f"backends to measure, of {', '.join(NAMES)}")
    line.add_argument("--mib", type=int, default=256, help="moved by one operation")
    line.add_argument("--block-kib", type=int, default=1024, help="each of its blocks")
    options = line.parse_args()
    names = chosen(line, options.only, ON_CPU, NAMES)
    nbytes = 8 * 2**20 if options.quick else options.mib * 2**20
    block_bytes = options.block_kib * 2**10
    if nbytes % block_bytes:
        line.error(f"{nbytes} bytes are no whole blocks of {block_bytes}")
    quiet()
    report = Report("rdma")
    effort = QUICK if options.quick else Effort(rounds=ROUNDS, share=FULL.share)
    progress = Console(stderr=True)
    run(measure(report, progress, names=names, effort=effort, nbytes=nbytes, block_bytes=block_bytes))
    tell(report, options.json)


if __name__ == "__main__":
    main()
