"""SGLang on a GPU: under our adapter, and asked directly, at one server."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import msgspec
from transformers import PreTrainedModel

from benchmarks.engine.models import ModuleWeights
from benchmarks.engine.native import Native
from benchmarks.engine.work import Work
from gyre.cell.config import SglangConfig
from gyre.cell.engine.sglang import SglangEngine
from gyre.cell.engine.sglang_launch import Served
from gyre.cell.engine.sglang_server import SglangServer

NO_SGLANG = "no --sglang-python: the interpreter of an environment with sglang"


class Direct:
    """Asks for the same answers, log-probabilities too, with as little as that takes: each call is told its
    first token and then all others. With `logprobs` False it does without them."""

    def __init__(self, name: str, server: SglangServer, logprobs: bool = True) -> None:
        self.name = name
        self._url = server.client.url
        self._key = server.key
        self._logprobs = logprobs
        self._draw = random.Random(name)

    async def arrivals_s(self, work: Work) -> list[float]:
        headers = {"Authorization": f"Bearer {self._key}"}
        prompts = work.prompts(self._draw)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
            start = perf_counter()
            calls = (self._arrivals(session, ids, work.new_tokens, start) for ids in prompts)
            return (await asyncio.gather(*calls))[-1]

    async def _arrivals(
        self, session: aiohttp.ClientSession, ids: Sequence[int], new_tokens: int, start: float
    ) -> list[float]:
        body = {
            "input_ids": ids,
            "stream": True,
            "return_logprob": self._logprobs,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
                "stream_interval": new_tokens,
            },
        }
        arrivals_s: list[float] = []
        async with session.post(f"{self._url}/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    tokens = msgspec.json.decode(line[6:])["meta_info"]["completion_tokens"]
                    arrivals_s.extend([perf_counter() - start] * (tokens - len(arrivals_s)))
        assert len(arrivals_s) == new_tokens
        return arrivals_s


@asynccontextmanager
async def sglang(
    config: SglangConfig, model: PreTrainedModel, options: dict[str, Any]
) -> AsyncIterator[tuple[Native, Direct, Direct]]:
    """Peers at one server with the weights of `model`: under the adapter, directly, and directly without
    log-probabilities."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm") as name:
        folder = Path(name)
        model.config.save_pretrained(folder)
        served = Served(
            model_folder=folder,
            dtype="bfloat16",
            window_tokens=options["window_tokens"],
            kv_tokens=options["kv_tokens"],
            block_tokens=16,
            max_batch=options["max_batch"],
        )
        server = SglangServer(served, config, folder / "server.log")
        await server.start()
        engine = SglangEngine(
            served,
            config,
            chunk_interval_s=options["chunk_interval_s"],
            eos_token_ids=(),
            vocab=model.config.vocab_size,
            log_path=folder / "server.log",
            scratch=folder / "scratch",
            server_url=server.client.url.replace("http://", f"http://:{server.key}@"),
        )
        try:
            await engine.wake(ModuleWeights(model))
            yield (
                Native("adapter", engine),
                Direct("sglang", server),
                Direct("sglang_plain", server, logprobs=False),
            )
        finally:
            await engine.close()
            await server.stop()
