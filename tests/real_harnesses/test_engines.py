"""Engines that leave, engines that are slow, a proxy that is killed: the work ends as it would have."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.real_harnesses.commands import HARNESSES, Harness
from tests.real_harnesses.law import Kept, check_law
from tests.real_harnesses.stage import Run, Stage, stage
from tests.real_harnesses.test_plain import TASK, WANTED, plain

pytestmark = pytest.mark.timeout(500)


def check_undisturbed(kept: Kept, run: Run) -> None:
    assert run.result.score == 1.0, run.log
    assert run.result.reason == "completed", run.log
    assert kept.paths() == 1
    assert kept.roles_count() == {"main": 4}


async def _change_roles(job: Stage, calls: asyncio.Queue[int]) -> None:
    while True:
        await job.change_role(job.cells[await calls.get()])


async def test_each_call_is_re_routed_in_mid_stream(
    harness: Harness, tokenizer: Path, shm: Path, tmp_path: Path
) -> None:
    """Its cell leaves rollout and the call goes on at another."""
    asked: asyncio.Queue[int] = asyncio.Queue()
    async with stage(tmp_path, tokenizer, shm, plain, cells=2, pass_s=lambda *_: 0.02) as job:
        changing = asyncio.create_task(_change_roles(job, asked))

        def on_token(cell: int, call: str, position: int) -> None:
            if position == 2:
                asked.put_nowait(cell)

        job.ledger.on_token = on_token
        run = await job.play(harness.config(), TASK, WANTED)
        changing.cancel()
        await asyncio.wait([changing])
        kept = check_law(job, run)
    check_undisturbed(kept, run)
    assert all(record.reroutes for record in kept.records)


async def test_an_engine_says_nothing_for_a_minute(tokenizer: Path, shm: Path, tmp_path: Path) -> None:
    async with stage(tmp_path, tokenizer, shm, plain) as job:
        job.waits_s = lambda call: 60.0 if call.endswith("-0001") else 0.0
        runs = await asyncio.gather(
            *(job.play(its.config(timeout_s=400.0), TASK, WANTED) for its in HARNESSES)
        )
        kept = [check_law(job, run) for run in runs]
    for run, its in zip(runs, kept, strict=True):
        assert run.result.seconds > 60.0
        check_undisturbed(its, run)


@pytest.mark.parametrize(
    ("number", "after_s", "at_token"),
    [("-0000", 0.0, 6), ("-0002", 0.0, 0), ("-0002", 5.0, 0), ("-0002", 0.0, 6), ("-0002", 0.0, 25)],
    ids=["first-call", "unbegun", "kept-alive", "in-the-text", "in-a-call"],
)
async def test_the_proxy_is_killed(
    harness: Harness, number: str, after_s: float, at_token: int, tokenizer: Path, shm: Path, tmp_path: Path
) -> None:
    """In its first answer, before an answer has begun, where a keep-alive has left already, after the first
    words. What was sampled until then is on a list; the work ends as without it."""
    killed: list[str] = []
    async with stage(tmp_path, tokenizer, shm, plain, pass_s=lambda *_: 0.02) as job:
        job.waits_s = lambda call: after_s if call.endswith(number) and not killed else 0.0

        def on_token(cell: int, call: str, position: int) -> None:
            if position == at_token and call.endswith(number) and not killed:
                killed.append(call)
                job.kill_proxy()

        job.ledger.on_token = on_token
        run = await job.play(harness.config(), TASK, WANTED)
        kept = check_law(job, run)
        died = [log for log in job.logs if log["event"] == "proxy_died"]
    check_undisturbed(kept, run)
    assert len(died) == 1
    assert kept.lost_tokens > at_token
