"""What only GPUs can show: memory that comes back, one server over two, weights by NCCL.

With GYRE_TEST_DEVICE=cuda. GYRE_TEST_ADDRESS is an address of this host that is not loopback's: to a server
there weights go as they would to another host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gyre.cell.engine import Engine, SamplingParams
from gyre.cell.engine.sglang import SglangEngine
from gyre.cell.engine.sglang_server import SglangServer
from tests.cell.engine.calls import VOCAB, chunks_of, generate, joined, prompt, request, until
from tests.sglang.conftest import SglangCase, sglang_config

MakeCase = Callable[..., SglangCase]
LONG = SamplingParams(temperature=1.0, max_new_tokens=200)
MIB = 1 << 20

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")


def used_mib(gpu: int) -> int:
    free, total = torch.cuda.mem_get_info(gpu)
    return (total - free) // MIB


def descriptors() -> Counter[str]:
    """By what they are of, numbers left out."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{number}"))] += 1
    return found


async def test_fifty_cycles_give_all_memory_back(make_case: MakeCase) -> None:
    case = make_case("llama", own=True, mem_fraction_static=0.2)
    # 2 GiB of KV.
    engine = await case.awake(kv_tokens=1 << 22)
    seen: list[tuple[int, int]] = []
    took_s: list[tuple[float, float]] = []
    for cycle in range(50):
        await generate(engine, prompt(20, cycle))
        call = asyncio.create_task(chunks_of(engine, request(prompt(9), LONG, call="live")))
        await until(engine, lambda metrics: metrics.running > 0, call)
        await engine.update(case.weights(1, version=2 * cycle + 1))
        awake = used_mib(0)
        times = [time.monotonic()]
        await engine.sleep()
        times.append(time.monotonic())
        asleep = used_mib(0)
        assert joined(await call).finish_reason == "abort"
        seen.append((awake, asleep))
        await engine.wake(case.weights(0, version=2 * cycle + 2))
        took_s.append((times[1] - times[0], time.monotonic() - times[1]))
    print(f"MiB used awake and asleep: {seen[0]}, after 10 cycles {seen[9]}, after 50 {seen[49]}")
    print(f"sleep, wake: {[sorted(part)[25] for part in zip(*took_s, strict=True)]} s")
    assert seen[49][0] - seen[49][1] > 2048
    assert abs(seen[49][0] - seen[9][0]) <= 16
    assert abs(seen[49][1] - seen[9][1]) <= 16


async def _serves(case: SglangCase, engine: Engine, seed: int, version: int) -> None:
    """Numbers of these weights, in 32 calls at once."""
    ids = [prompt(9 + number, number) for number in range(32)]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=40)
    calls = [chunks_of(engine, request(one, sampling, call=f"c{at}")) for at, one in enumerate(ids)]
    for one, chunks in zip(ids, await asyncio.gather(*calls), strict=True):
        got = joined(chunks)
        assert set(got.versions) == {version}
        want = case.logprobs(one, got.token_ids, 1.0, seed=seed)
        assert max(abs(a - b) for a, b in zip(got.logprobs, want, strict=True)) < case.tolerance


@two_gpus
async def test_weights_by_nccl_to_a_server_on_another_gpu(make_case: MakeCase, shm: Path) -> None:
    case = make_case("llama")
    config = sglang_config(arguments=(*sglang_config().arguments, "--host=0.0.0.0"))
    server = SglangServer(case.served(gpu=1), config, shm / "far.log")
    await server.start()
    port = server.client.url.rsplit(":", 1)[1]
    engine = SglangEngine(
        case.served(),
        sglang_config(),
        chunk_interval_s=0.0,
        eos_token_ids=(),
        vocab=VOCAB,
        log_path=shm / "far.log",
        scratch=shm / "far",
        server_url=f"http://:{server.key}@{os.environ['GYRE_TEST_ADDRESS']}:{port}",
    )
    try:
        await engine.wake(case.weights(0))
        await _serves(case, engine, 0, 0)
        took_s: list[float] = []
        fds: list[Counter[str]] = []
        for version in range(1, 21):
            if version == 10:
                used = used_mib(0), used_mib(1)
            fds.append(descriptors())
            began_s = time.monotonic()
            await engine.update(case.weights(version % 2, version=version))
            took_s.append(time.monotonic() - began_s)
        print(f"update by NCCL: median {sorted(took_s)[10] * 1000:.0f} ms")
        # Before there are calls again: their connections are kept for a while.
        fds.append(descriptors())
        print(f"descriptors: {[one.total() for one in fds]}, and more by {fds[-1] - fds[1]}")
        assert (fds[20] - fds[10]).total() <= 2
        assert used_mib(0) - used[0] <= 64 and used_mib(1) - used[1] <= 64
        await _serves(case, engine, 0, 20)
    finally:
        await engine.close()
        await server.stop()


@two_gpus
async def test_one_server_over_two_gpus(make_case: MakeCase) -> None:
    case = make_case("llama", own=True)
    engine = await case.awake(ranks=2)
    await _serves(case, engine, 0, 0)
    await engine.update(case.weights(1, version=1))
    await _serves(case, engine, 1, 1)
    awake = used_mib(0), used_mib(1)
    await engine.sleep()
    asleep = used_mib(0), used_mib(1)
    print(f"MiB used on both GPUs awake {awake}, asleep {asleep}")
    assert all(after < before for before, after in zip(awake, asleep, strict=True))
    await engine.wake(case.weights(0, version=2))
    await _serves(case, engine, 0, 2)
