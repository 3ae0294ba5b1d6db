"""The command line of a cell's SGLang server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

# Room beyond a call's window, which SGLang keeps for itself.
SPARE_TOKENS = 2
CPU_ARGUMENTS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is to serve: the model in `model_folder`, whose weights it does not read, over `ranks`
    GPUs from number `gpu` on."""

    model_folder: Path
    dtype: str
    window_tokens: int
    kv_tokens: int
    block_tokens: int
    max_batch: int
    step_tokens: int | None = None
    device: Literal["cpu", "cuda"] = "cuda"
    gpu: int = 0
    ranks: int = 1
    routed_experts: bool = False


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    http: int
    rendezvous: int


def command(
    python: Path,
    served: Served,
    ports: Ports,
    *,
    name: str,
    key: str,
    mem_fraction_static: float,
    memory_saver: bool,
    arguments: tuple[str, ...],
) -> list[str]:
    """`arguments` come last and so win. Token ids in and out: the server needs no tokenizer, and without a
    detokenizer between them tokens and the end of a weight update reach us in one order."""
    options = [
        f"--model-path={served.model_folder}",
        f"--served-model-name={name}",
        f"--api-key={key}",
        "--host=127.0.0.1",
        f"--port={ports.http}",
        f"--nccl-port={ports.rendezvous}",
        f"--dtype={served.dtype}",
        "--load-format=dummy",
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--incremental-streaming-output",
        "--grammar-backend=none",
        # Else it asks for work without a pause, on a core that the cell's trainer needs.
        "--sleep-on-idle",
        "--log-level=error",
        f"--context-length={served.window_tokens + SPARE_TOKENS}",
        f"--max-total-tokens={served.kv_tokens + 2 * served.block_tokens}",
        f"--page-size={served.block_tokens}",
        f"--max-running-requests={served.max_batch}",
        f"--mem-fraction-static={mem_fraction_static:g}",
        f"--tp-size={served.ranks}",
    ]
    if served.step_tokens is not None:
        options.append(f"--chunked-prefill-size={served.step_tokens}")
    if served.routed_experts:
        options.append("--enable-return-routed-experts")
    if served.device == "cpu":
        options.extend(CPU_ARGUMENTS)
    else:
        options.append(f"--base-gpu-id={served.gpu}")
        if memory_saver:
            options.append("--enable-memory-saver")
    return [str(python), "-m", "sglang.launch_server", *options, *arguments]


def environment(served: Served, extra: Mapping[str, str]) -> dict[str, str]:
    """Ours, and what it needs."""
    found = dict(os.environ)
    # Our own interpreter's modules are not for that one. To compile all anew would cost it a minute.
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "SGLANG_RETURN_ORIGINAL_LOGPROB"):
        found.pop(name, None)
    found["HF_HUB_OFFLINE"] = "1"
    # The spare tokens are beyond what the model says of itself, and never used.
    found["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if served.device == "cpu":
        found["SGLANG_USE_CPU_ENGINE"] = "1"
        # It would compile its sampler, for most of a minute, in the first call.
        found["TORCHDYNAMO_DISABLE"] = "1"
    return found | dict(extra)
