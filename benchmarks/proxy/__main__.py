"""`python -m benchmarks.proxy [--json] [--quick] [--only calls,long,memory,peer] [--rllm-python FILE]`.

`calls`: harnesses in conversations of tool users, 256 at once, at the engine and through the proxy. `long`:
the last of 500 calls of an execution of 1M tokens. `memory`: 1,000 open executions. `peer`: the harnesses of
`calls` before rLLM's gateway, which an environment of its own has.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.awake import awake_cores
from benchmarks.command import chosen, parser, tell
from benchmarks.process import quiet
from benchmarks.proxy.calls import PEER, ours, peer
from benchmarks.proxy.engine import Pace
from benchmarks.proxy.long import CALLS, EXECUTIONS, TOKENS, long, open_executions
from benchmarks.proxy.stage import stage
from benchmarks.proxy.words import write_tokenizer
from benchmarks.report import Report
from gyre.actors import run

PARTS = ("calls", "long", "memory", "peer")
# 50 tokens a second; chunks as an engine's are.
TALK = Pace(ids=(), tokens=250, first_s=0.2, token_s=0.02, chunk_s=0.05)
BRIEF = Pace(ids=(), tokens=25, first_s=0.02, token_s=0.01, chunk_s=0.05)
AT_ONCE = Pace(ids=(), tokens=1000, first_s=0.0, token_s=0.0, chunk_s=0.05)
HARNESSES, TURNS = 256, 6


async def measure(report: Report, console: Console, parts: list[str], quick: bool, rllm: Path | None) -> None:
    harnesses, turns = (16, 2) if quick else (HARNESSES, TURNS)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        folder = Path(name)
        ids = write_tokenizer(folder / "tokenizer")
        talk = msgspec.structs.replace(BRIEF if quick else TALK, ids=ids)
        at_once = msgspec.structs.replace(AT_ONCE, ids=ids)
        if "calls" in parts or "peer" in parts:
            (folder / "talk").mkdir()
            awake = nullcontext() if quick else awake_cores()
            async with stage(folder / "tokenizer", folder / "talk", talk) as one, awake:
                console.print("calls ...")
                added = await ours(report, one, talk, harnesses, turns)
                if "peer" in parts and rllm is not None:
                    console.print("peer ...")
                    theirs = await peer(report, one, talk, harnesses, turns, rllm, folder)
                    report.at_most("calls.added_p50_to_peer_ratio", added.p50_s / theirs.p50_s, 1.0)
        if "peer" in parts and rllm is None:
            reason = f"--rllm-python names no environment with {PEER}"
            report.unmet("calls.added_p50_to_peer_ratio", "<=", 1.0, reason)
        if "long" in parts:
            console.print("long ...")
            (folder / "long").mkdir()
            async with stage(folder / "tokenizer", folder / "long", at_once) as one:
                calls, tokens = (20, 40_000) if quick else (CALLS, TOKENS)
                await long(report, one, at_once.tokens, calls, tokens)
        if "memory" in parts:
            console.print("memory ...")
            (folder / "memory").mkdir()
            async with stage(folder / "tokenizer", folder / "memory", at_once) as one:
                await open_executions(report, one, 50 if quick else EXECUTIONS, at_once.tokens)


def main() -> None:
    made = parser("proxy", "What the proxy costs.")
    made.add_argument("--only", metavar="PARTS", help=f"of {', '.join(PARTS)}, separated by commas")
    made.add_argument(
        "--rllm-python", type=Path, metavar="FILE", help=f"the interpreter of an environment with {PEER}"
    )
    options = made.parse_args()
    quiet()
    report = Report("proxy")
    parts = chosen(made, options.only, PARTS, PARTS)
    run(measure(report, Console(stderr=True), parts, options.quick, options.rllm_python))
    tell(report, options.json)


if __name__ == "__main__":
    main()
