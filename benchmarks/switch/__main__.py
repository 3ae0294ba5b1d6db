"""`python -m benchmarks.switch [--json] [--quick] [--changes 50] [--device cuda] [--model FOLDER] [...]`."""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.command import add_sglang, parser, sglang_config, tell
from benchmarks.process import quiet
from benchmarks.report import Report
from benchmarks.switch.job import Shape, SwitchJob
from benchmarks.switch.resources import Resources, look
from gyre.actors import Node, run
from gyre.cell.recipes import model_folder
from gyre.cell.role_change import LEAVE_TRAINING
from gyre.schedule.transitions import Change
from gyre.trajectory.journal import Journal

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "policy.py"
LIMIT_S = {"cpu": 0.3, "cuda": 1.0}
WARM = 5
# Of what is private to the processes; allocators keep some of what came and went.
MEMORY_GROWTH = 1.03
GPU_GROWTH_BYTES = 64 * 2**20
# Between the last two thirds of the changes. Files are mapped for a copy, and let go of some time later.
FLAT = {"processes": 0, "descriptors": 0, "mapped": 4, "sockets": 0, "threads": 0, "regions": 0}


async def measure(report: Report, console: Console, shape: Shape, changes: int) -> None:
    """Satellite 1 leaves and comes back, as often as said, after some times that do not count."""
    to_train: list[Change] = []
    to_rollout: list[Change] = []
    held: list[Resources] = []
    with (
        tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm") as shm,
        tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder,
    ):
        async with Journal(Path(folder) / "journal.db") as journal, Node(name="bench") as node:
            job = SwitchJob(shape, node, journal, Path(folder), Path(shm))
            console.print("cells start ...")
            await job.start()
            async with job.calls():
                for turn in range(WARM + changes):
                    left, back = await job.to_train(1), await job.to_rollout(1)
                    took_s = [sum(change.states_s.values()) for change in (left, back)]
                    console.print(f"{turn + 1} of {WARM + changes}: {took_s[0]:.2f} s, {took_s[1]:.2f} s")
                    if turn < WARM:
                        continue
                    to_train.append(left)
                    to_rollout.append(back)
                    held.append(look(job.shm, cuda=shape.device == "cuda"))
            failed = (await job.totals()).failed_calls
    summarise(report, "to_train", to_train)
    summarise(report, "to_rollout", to_rollout)
    report.at_least("calls_moved_per_change", sum(change.calls for change in to_train) / changes, 1)
    report.at_most("failed_calls", failed, 0)
    for name, changed in (("to_train", to_train), ("to_rollout", to_rollout)):
        p50 = quantile([beyond_drain_s(change) for change in changed], 0.5)
        report.at_most(f"{name}.beyond_drain_p50_s", p50, LIMIT_S[shape.device])
    flat(report, held)


def beyond_drain_s(change: Change) -> float:
    """Without ending what the cell had begun, which it would have had to end in its role too."""
    return sum(seconds for state, seconds in change.states_s.items() if state not in LEAVE_TRAINING)


def summarise(report: Report, direction: str, changes: list[Change]) -> None:
    by_state: dict[str, list[float]] = defaultdict(list)
    for change in changes:
        for state, seconds in change.states_s.items():
            by_state[state].append(seconds)
        by_state["all"].append(sum(change.states_s.values()))
    for state, took_s in by_state.items():
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            report.figure(f"{direction}.{state}_{name}_s", quantile(took_s, share))


def flat(report: Report, held: list[Resources]) -> None:
    """The least of the last third against the least of the one before: what comes and goes is no growth, nor
    are links between processes that were made when first needed."""
    third = max(1, len(held) // 3)
    middle, last = held[-2 * third : -third] or held, held[-third:]

    def least(samples: list[Resources], name: str) -> int:
        return min(int(msgspec.structs.asdict(sample)[name]) for sample in samples)

    for name, limit in FLAT.items():
        report.figure(name, least(last, name))
        report.at_most(f"{name}_grown_by", least(last, name) - least(middle, name), limit)
    report.figure("memory_mb", least(last, "memory_bytes") / 1e6)
    growth = least(last, "memory_bytes") / least(middle, "memory_bytes")
    report.at_most("memory_growth_ratio", growth, MEMORY_GROWTH)
    gpu = least(last, "gpu_bytes") - least(middle, "gpu_bytes")
    report.at_most("gpu_grown_by_bytes", gpu, GPU_GROWTH_BYTES)


def quantile(values: list[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def shape_of(options: argparse.Namespace) -> Shape:
    model = options.model or model_folder(f"{QUICKSTART}:write_model")
    return Shape(
        model=model,
        device=options.device,
        engine=options.engine,
        sglang=sglang_config(options),
        dtype="bfloat16" if options.device == "cuda" else "float32",
        ranks=options.ranks,
        parallel="tensor" if options.engine == "sglang" else options.parallel,
        calls=options.calls,
    )


def main() -> None:
    line = parser("switch", "Role changes of a satellite with live calls.")
    line.add_argument("--changes", type=int, default=50, help="each way")
    line.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    line.add_argument("--model", type=Path, help="a model folder, by default the quickstart's")
    line.add_argument("--ranks", type=int, default=1, help="of a cell")
    line.add_argument("--parallel", choices=("data", "tensor"), default="data")
    line.add_argument("--engine", choices=("native", "sglang"), default="native")
    add_sglang(line)
    line.add_argument("--calls", type=int, default=8, help="in flight")
    options = line.parse_args()
    quiet()
    report = Report("switch")
    changes = 3 if options.quick else options.changes
    run(measure(report, Console(stderr=True), shape_of(options), changes))
    tell(report, options.json)


if __name__ == "__main__":
    main()
