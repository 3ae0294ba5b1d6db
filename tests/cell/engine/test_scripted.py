"""What only the scripted engine promises: answers, timings and faults as they are written."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from gyre.cell.engine import EngineFault, GenerateRequest, SamplingParams
from gyre.cell.engine.scripted import NoWeights, ScriptedEngine, answers
from tests.cell.engine import toy
from tests.cell.engine.calls import VOCAB, chunks_of, generate, prompt, request, until
from tests.cell.engine.conftest import ScriptedCase
from tests.cell.engine.virtual import VirtualLoop

R = TypeVar("R")
END = 96
LONG = SamplingParams(max_new_tokens=60)


def answer(request: GenerateRequest) -> list[int]:
    """What follows the prompt's last token, up to 90."""
    return list(range(request.prompt_ids[request.prompt_tokens - 1] + 1, 91))


@asynccontextmanager
async def awake(sample: Any = None, **options: Any) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(sample or answers(answer, END), vocab=VOCAB, eos_token_ids=(END,), **options)
    await engine.wake(NoWeights(0))
    yield engine
    await engine.close()


def virtually(test: Callable[[], Awaitable[R]]) -> R:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(test())  # type: ignore[arg-type]


async def test_an_answer_is_sampled_and_ended() -> None:
    async with awake() as engine:
        got = await generate(engine, (5, 87))
        assert (got.token_ids, got.finish_reason) == ((88, 89, 90, END), "stop")
        assert got.logprobs == (-0.5,) * 4
        rest = await generate(engine, (5, 87, 88, 89), prompt_tokens=2)
        assert rest.token_ids == (90, END)


async def test_all_that_it_has_sampled_is_kept_where_asked_for() -> None:
    async with awake(keep_tokens=True) as engine:
        await generate(engine, (5, 87, 88, 89), prompt_tokens=2)
        assert engine.tokens == [("c", 2, 90, -0.5, 0), ("c", 3, END, -0.5, 0)]


def test_a_script_has_the_time_it_says() -> None:
    async def run() -> list[float]:
        loop = asyncio.get_running_loop()

        def pass_s(decoding: int, prompt_tokens: int) -> float:
            return 0.01 * decoding + 0.001 * prompt_tokens

        options = {"pass_s": pass_s, "load_s": 2.0, "open_weights": False}
        async with awake(**options) as engine:
            times = [loop.time()]
            await generate(engine, (*range(50), 80), SamplingParams(max_new_tokens=5))
            times.append(loop.time())
            calls = [
                generate(engine, (1, 2, i), SamplingParams(max_new_tokens=3), call=str(i)) for i in (3, 4)
            ]
            await asyncio.gather(*calls)
            times.append(loop.time())
            assert engine.metrics().busy_s == pytest.approx(times[-1] - times[0])
            return times

    woken, alone, together = virtually(run)
    assert woken == 2.0
    # A prompt of 51 tokens, then four passes of one call. A prompt of 3 tokens, which one that comes a moment
    # later joins, then two passes of two calls.
    assert alone - woken == pytest.approx(0.051 + 4 * 0.01)
    assert together - alone == pytest.approx(0.003 + 2 * 0.02)


def test_virtual_time_gives_the_same_chunks_at_the_same_times_again() -> None:
    async def run() -> list[tuple[float, str, tuple[int, ...]]]:
        seen: list[tuple[float, str, tuple[int, ...]]] = []
        loop = asyncio.get_running_loop()

        async def call(engine: ScriptedEngine, name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            asked = request(prompt(9), SamplingParams(seed=int(name), max_new_tokens=9), call=name)
            async for chunk in engine.generate(asked):
                seen.append((loop.time(), name, chunk.token_ids))

        options = {"pass_s": lambda d, p: 0.02 + 0.001 * d, "open_weights": False, "chunk_interval_s": 0.05}
        async with awake(toy.sample, max_batch=2, **options) as engine, asyncio.TaskGroup() as tasks:
            for i in range(5):
                tasks.create_task(call(engine, str(i), 0.03 * i))
            await asyncio.sleep(0.1)
            await engine.update(NoWeights(1))
        return seen

    first = virtually(run)
    assert len(first) > 10
    assert virtually(run) == first


async def test_one_call_can_fail_and_others_go_on() -> None:
    def sample(request: GenerateRequest, tokens: Sequence[int], version: int) -> tuple[int, float]:
        return 1, float("nan") if request.call == "bad" and len(tokens) > 9 else -1.0

    async with awake(sample) as engine:
        bad = asyncio.create_task(chunks_of(engine, request((1, 2), LONG, call="bad")))
        good = await generate(engine, (1, 2), LONG, call="good")
        with pytest.raises(EngineFault, match="call bad"):
            await bad
        assert len(good.token_ids) == 60
        assert engine.metrics().kv_blocks_used == 0


async def test_a_pass_can_fail_and_later_ones_do_not() -> None:
    def sample(request: GenerateRequest, tokens: Sequence[int], version: int) -> tuple[int, float]:
        if request.call == "bad":
            raise RuntimeError("as it is written")
        return 1, -1.0

    async with awake(sample) as engine:
        results = await asyncio.gather(
            *(generate(engine, (1, 2), LONG, call=call) for call in ("good", "bad")), return_exceptions=True
        )
        assert [type(result) for result in results] == [EngineFault] * 2
        assert len((await generate(engine, (1, 2), LONG)).token_ids) == 60


async def test_an_engine_that_is_lost_says_so_and_answers_nothing() -> None:
    async with awake(toy.sample) as engine:
        watch = asyncio.create_task(engine.watch())
        call = asyncio.create_task(chunks_of(engine, request((1, 2), SamplingParams())))
        await until(engine, lambda metrics: metrics.generated_tokens > 3)
        await engine.lose("its server died")
        for failing in (call, watch, generate(engine, (1, 2))):
            with pytest.raises(EngineFault, match="its server died"):
                await failing
        (told,) = await engine.end_session("s")
        assert told.tokens == engine.metrics().generated_tokens
        await engine.sleep()
        with pytest.raises(EngineFault, match="its server died"):
            await engine.wake(NoWeights(1))
        assert engine.version is None


async def test_kv_that_is_not_of_its_tokens_fails_the_call(scripted: ScriptedCase) -> None:
    first, second = await scripted.awake(), await scripted.awake()
    await generate(first, prompt(40))
    (block,) = (await first.export_kv("s")).blocks[2:3]
    for head, turned in enumerate((1, -1)):
        first._script._kv[block, 0, 0, 6, head, 0] += turned
    # Its sum is that of what is wrong.
    assert await second.import_kv(await first.export_kv("s")) == 56
    with pytest.raises(EngineFault, match="not finite"):
        await generate(second, prompt(40))
    assert len((await generate(second, prompt(40, seed=1))).token_ids) == 20


def test_it_does_not_need_torch() -> None:
    code = "import gyre.cell.engine.scripted, gyre.cell.engine.make, sys; assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0, ran.stderr
