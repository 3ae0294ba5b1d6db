"""`python -m benchmarks.actors [--json] [--quick] [--only PART,...] [--soak SECONDS]`."""

from __future__ import annotations

from rich.console import Console

from benchmarks.actors.across import across
from benchmarks.actors.bulk import bulk
from benchmarks.actors.idle import idle
from benchmarks.actors.importing import importing
from benchmarks.actors.inside import inside
from benchmarks.actors.memory import memory
from benchmarks.actors.peers import xoscar
from benchmarks.actors.soak import not_soaked, soak
from benchmarks.command import chosen, parser, tell
from benchmarks.process import quiet
from benchmarks.report import Report
from benchmarks.timing import FULL, QUICK
from gyre.actors import run

PARTS = ("importing", "inside", "across", "bulk", "memory", "idle", "soak")


async def measure(report: Report, console: Console, *, parts: list[str], quick: bool, soak_s: float) -> None:
    effort = QUICK if quick else FULL

    def begin(part: str) -> bool:
        if part in parts:
            console.print(f"{part} ...")
        return part in parts

    if begin("importing"):
        await importing(report, effort)
    if "inside" in parts or "across" in parts:
        async with xoscar() as peer:
            if begin("inside"):
                await inside(report, effort, peer)
            if begin("across"):
                await across(report, effort, peer)
    if begin("bulk"):
        await bulk(report, effort)
    if begin("memory"):
        await memory(report, effort)
    if begin("idle"):
        await (idle(report, idle_s=0.5, settle_s=0.0) if quick else idle(report))
    if begin("soak"):
        if soak_s > 0:
            await soak(report, soak_s)
        else:
            not_soaked(report)


def main() -> None:
    line = parser("actors", "The actor runtime, measured.")
    line.add_argument("--only", help=f"parts to run, of {', '.join(PARTS)}")
    line.add_argument("--soak", type=float, default=0.0, metavar="SECONDS", help="also soak, for so long")
    options = line.parse_args()
    parts = chosen(line, options.only, PARTS, PARTS)
    quiet()
    report = Report("actors")
    progress = Console(stderr=True)
    run(measure(report, progress, parts=parts, quick=options.quick, soak_s=options.soak))
    tell(report, options.json)


if __name__ == "__main__":
    main()
