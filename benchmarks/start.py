"""`python -m benchmarks.start [--json] [--quick] [--device cpu|cuda]`: from the order for a rank of a small
model to its engine being awake, executed and forked in turns. Gates: a fork takes a fifth of it."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter

import structlog
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.command import parser, tell
from benchmarks.process import quiet
from benchmarks.report import Report
from benchmarks.weights.training import setup_of
from gyre.actors import ChildSpec, Node, run
from gyre.actors.forking.keeper import ForkServer
from gyre.actors.forking.messages import FORK_SERVER
from gyre.cell.ranks import RANK_MODULES, rank_environment, rank_process
from gyre.cell.worker_messages import CellSetup, LoadModel, WakeEngine, WorkerConfig, WriteSnapshot

ROUNDS = 5
FORKED_PART = 0.2
LOAD_TIMEOUT_S = 120.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Figures = dict[str, list[float]]


def write_model(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)


async def measure(node: Node, setup: CellSetup, way: str, figures: Figures) -> None:
    began = perf_counter()
    ref = await node.spawn(rank_process(WorkerConfig(setup=setup, cell=0, rank=0, core=True)))
    await ref.ask(LoadModel(), timeout_s=LOAD_TIMEOUT_S)
    region = await ref.ask(WriteSnapshot(version=0))
    await ref.ask(WakeEngine(version=0, region=region), timeout_s=LOAD_TIMEOUT_S)
    figures[f"{way}_ready_s"].append(perf_counter() - began)
    process = process_of(setup.log_folder / "cell-0-rank-0.log")
    figures[f"{way}_cpu_s"].append(cpu_s(process))
    for name, nbytes in memory(process).items():
        figures[f"{way}_{name}_bytes"].append(nbytes)
    await node.stop(ref)


def process_of(log: Path) -> Path:
    """The one that writes that log."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd" / "1") == str(log):
                return process
        except OSError:
            continue
    raise LookupError(f"nobody writes {log}")


def cpu_s(process: Path) -> float:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def memory(process: Path) -> dict[str, int]:
    lines = (process / "smaps_rollup").read_text().splitlines()
    sizes = {line.partition(":")[0]: line.split()[1] for line in lines[1:]}
    return {name.lower(): int(sizes[name]) * 1024 for name in ("Rss", "Pss")}


async def measure_all(report: Report, console: Console, device: str, rounds: int) -> None:
    figures: Figures = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm") as shm,
        tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder,
    ):
        model = Path(folder) / "model"
        await asyncio.to_thread(write_model, model)
        setup = setup_of(model, Path(shm), Path(folder), device)
        environment = rank_environment(setup.cluster.threads_per_rank)
        async with Node(name="bench") as node:
            node.fork_server = ""
            await node.spawn(ChildSpec(name="forks", start=lambda: ForkServer(RANK_MODULES, environment)))
            server = node.fork_server
            with structlog.testing.capture_logs() as events:
                await measure(node, setup, "first", defaultdict(list))  # the server imports
                for _ in range(rounds):
                    for way, by in (("executed", ""), ("forked", server)):
                        console.print(f"{way} ...")
                        node.fork_server = by
                        await measure(node, setup, way, figures)
            node.fork_server = server
    for name, values in figures.items():
        report.figure(name, statistics.median(values))
    refused = [event["reason"] for event in events if event["event"] == "not_forked"]
    for unit in ("ready_s", "cpu_s"):
        if refused:
            report.unmet(f"forked_of_executed_{unit}", "<=", FORKED_PART, refused[0])
            continue
        ratio = statistics.median(figures[f"forked_{unit}"]) / statistics.median(figures[f"executed_{unit}"])
        report.at_most(f"forked_of_executed_{unit}", ratio, FORKED_PART)


def main() -> None:
    made = parser("start", "From the order for a rank to its engine being awake.")
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = made.parse_args()
    os.environ.pop(FORK_SERVER, None)
    quiet()
    report = Report("start")
    rounds = 1 if options.quick else ROUNDS
    run(measure_all(report, Console(stderr=True), options.device, rounds))
    tell(report, options.json)


if __name__ == "__main__":
    main()
