"""`python -m benchmarks.weights [--json] [--quick] [--device cpu|cuda] [--only 0.135B,1B,3B,training]`."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from functools import partial

import torch
from rich.console import Console

from benchmarks.actors.raw import RawSender, raw_sender
from benchmarks.command import chosen, parser, tell
from benchmarks.process import Companion, companion, quiet
from benchmarks.report import Report
from benchmarks.timing import Segment, rates
from benchmarks.weights.models import LARGE
from gyre.actors import run

# Rounds: small ones are short, and on a busy machine few of them run undisturbed.
SIZES = {"0.135B": 20, "1B": 5, "3B": 3}
TO_LINK = 0.8
# Through memory to publish, against a copy of the snapshot: it is made of float32, on a GPU in the GPU.
TRAFFIC = {"cpu": 1.5, "cuda": 1.0}
RAW_TCP_BYTES = 256 * 2**20


async def told(process: Companion, order: str, count: int) -> float:
    return float((await process.ask(order))["seconds"])


async def by_all(processes: list[Companion], order: str, count: int) -> float:
    """At once: until the last is through."""
    return max(await asyncio.gather(*(told(process, order, count) for process in processes)))


async def sent(raw: RawSender, times: int, count: int) -> None:
    """As long as what is beside it takes."""
    for _ in range(times):
        await raw.run(count // times)


async def measure_size(report: Report, console: Console, size: str, device: str, rounds: int) -> None:
    """One process publishes; on the CPU another one pulls, on GPUs those of all other GPUs do, at once."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    devices = [f"cuda:{gpu}" for gpu in range(gpus)] if gpus else ["cpu", "cpu"]
    world = str(len(devices))
    console.print(f"{size} ...")
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm"))
        start = partial(companion, "benchmarks.weights.core", folder, size, devices[0], world)
        core = await stack.enter_async_context(start())
        nbytes = int(core.hello["nbytes"])
        where = (str(core.hello["endpoint"]), str(core.hello["store"]))
        readers = [
            await stack.enter_async_context(
                companion("benchmarks.weights.reader", folder, size, at, str(rank), world, *where)
            )
            for rank, at in enumerate(devices[1:], 1)
        ]
        segments = {
            "publish": partial(told, core, "publish"),
            "raw_publish": partial(told, core, "raw"),
            "pull": partial(by_all, readers, "mapped"),
            "raw_pull": partial(by_all, readers, "raw"),
            "tcp.pull": partial(by_all, readers[:1], "tcp"),
            "tcp.pull_and_load": partial(by_all, readers[:1], "tcp_loaded"),
        }
        if size not in LARGE or gpus:
            segments["publish_to_new_memory"] = partial(told, core, "fresh")
            segments["pull_to_new_memory"] = partial(by_all, readers, "new")
        if gpus:
            segments["nccl_broadcast"] = partial(by_all, [core, *readers], "broadcast")
        for run_one in segments.values():
            await run_one(nbytes)  # mapped, connected and touched once
        timed = [Segment(name, nbytes, run_one) for name, run_one in segments.items()]
        raw_bytes = min(nbytes, RAW_TCP_BYTES)
        raw = await stack.enter_async_context(raw_sender(raw_bytes))
        times = round(nbytes / raw_bytes)
        timed.append(Segment("tcp.raw", times * raw_bytes, partial(sent, raw, times)))
        per_s = await rates(timed, rounds)
    for name, rate in per_s.items():
        report.figure(f"{size}.{name}_gb_per_s", rate / 1e9)
    links = {"publish": per_s["raw_publish"] / TRAFFIC[device], "pull": per_s["raw_pull"]}
    links["tcp.pull"] = per_s["tcp.raw"]
    for name, link in links.items():
        report.at_least(f"{size}.{name}_to_link_ratio", per_s[name] / link, TO_LINK)


async def measure_all(
    report: Report, console: Console, parts: list[str], device: str, *, quick: bool
) -> None:
    for part in parts:
        if part == "training":
            # It imports transformers.
            from benchmarks.weights.training import measure_training

            await measure_training(report, console, device, quick=quick)
        else:
            await measure_size(report, console, part, device, 1 if quick else SIZES[part])


def main() -> None:
    line = parser("weights", "Publishing weights and pulling them, and what the core loses by it.")
    line.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    line.add_argument("--only", help=f"sizes of {', '.join(SIZES)}, and training")
    options = line.parse_args()
    usual = ["0.135B", "training"] if options.quick else [*SIZES, "training"]
    parts = chosen(line, options.only, usual, [*SIZES, "training"])
    quiet()
    report = Report("weights")
    run(measure_all(report, Console(stderr=True), parts, options.device, quick=options.quick))
    tell(report, options.json)


if __name__ == "__main__":
    main()
