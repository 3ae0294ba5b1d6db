"""A core and a satellite of two ranks each, as a job runs them: processes, which meet anew for each role, a
real queue and journal. One step, trained by both, from rollout to rollout, where a cell's ranks are one
engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gyre.actors import (
    ActorDied,
    Node,
    Ref,
    RemoteError,
)
from gyre.cell.checkpoints import check
from gyre.cell.config import TrainConfig
from gyre.cell.engine.base import GenerateRequest, SamplingParams
from gyre.cell.messages import (
    EnterRollout,
    EnterTrain,
    Generate,
    GetStatus,
    Publish,
    SaveCheckpoint,
)
from gyre.cell.rank import Rank
from gyre.cell.weights import parameters
from gyre.cell.worker_messages import CellSetup, WorkerConfig
from gyre.schedule.messages import StepDone
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup
from gyre.trajectory.queue import QueueTotals
from gyre.trajectory.queue_actor import GetQueueTotals
from tests.cell.parts import cell_setup, micro_step, trajectory
from tests.cell.two_cells import TwoCells, process_of

PROMPT = tuple(range(1, 9))
NEW_TOKENS = 12
MICRO_STEPS = (
    micro_step(trajectory(0, tokens=14), trajectory(1, tokens=20)),
    micro_step(trajectory(2, tokens=9), index=1),
)


async def answers(job: TwoCells) -> list[tuple[tuple[int, ...], tuple[float, ...], set[int]]]:
    """What every engine of every cell answers to one prompt, greedily: tokens, log-probabilities and the
    versions they were sampled under."""
    return [await _answer(engine) for up in job.ups for engine in up.engines]


async def _answer(engine: Ref) -> tuple[tuple[int, ...], tuple[float, ...], set[int]]:
    request = GenerateRequest(
        call="c",
        session="s",
        prompt_ids=PROMPT,
        prompt_tokens=len(PROMPT),
        sampling=SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS),
    )
    chunks = [chunk async for chunk in engine.stream(Generate(request=request))]
    return (
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        {version for chunk in chunks for version in chunk.versions},
    )


@pytest.fixture
async def job(even_policy_folder: Path, shm: Path, tmp_path: Path) -> AsyncIterator[TwoCells]:
    # With a smaller eps Adam moves a weight by as much whose gradient is all but zero, and rounding shows.
    train = TrainConfig(lr=3e-2, eps=1e-3, max_grad_norm=1.0)
    setup = cell_setup(
        even_policy_folder, shm, tmp_path / "checkpoints", ranks=2, parallel="tensor", train=train
    )
    async with Journal(tmp_path / "journal.db") as journal, Node(name="test") as node:
        made = TwoCells(setup, node, journal)
        await made.start()
        yield made


def by_one_rank(setup: CellSetup, shm: Path) -> list[torch.Tensor]:
    """The weights after the same step on a core of one rank."""
    alone = cell_setup(setup.model_folder, shm, setup.checkpoint_folder, train=setup.train)
    with ThreadPoolExecutor(1) as thread:
        config = WorkerConfig(setup=alone, cell=0, rank=0, core=True)
        rank = Rank(config, torch.device("cpu"), thread)
        rank.load(None)
        rank.begin_training(rank.write_snapshot(0))
        for one in MICRO_STEPS:
            rank.micro_step(one)
        rank.add_own()
        rank.commit(1, scale=0.5)
    assert rank._trainer is not None
    return [parameter.detach() for parameter in parameters(rank._trainer.model)]


def greedy(folder: Path) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([PROMPT])
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], -1)
    return tuple(ids[0, len(PROMPT) :].tolist())


@pytest.mark.timeout(180)
async def test_two_cells_of_two_ranks_train_a_step_together(
    job: TwoCells, even_policy_folder: Path, shm: Path
) -> None:
    assert [(up.role, up.version, len(up.engines)) for up in job.ups] == [("rollout", 0, 1)] * 2
    before = await answers(job)
    assert {tokens for tokens, _, _ in before} == {greedy(even_policy_folder)}
    assert {tuple(versions) for _, _, versions in before} == {(0,)}

    # To train; each cell computes one micro-step, the satellite's share crosses to the core.
    changed = await job.change(EnterTrain())
    assert [(c.cell, c.role, c.version) for c in changed] == [(0, "train", 0), (1, "train", 0)]
    assert {await job.queue.claimed.get() for _ in range(2)} == {0, 1}
    group = AddGroup(group="g000000", step=0, executions=2, micro_steps=MICRO_STEPS)
    await job.queue_ref.ask(group)
    assert await job.waterlevel.done == StepDone(step=0, version=1)
    totals = await job.queue_ref.ask(GetQueueTotals())
    assert totals == QueueTotals(steps=1, micro_steps_by_cell={0: 1, 1: 1})

    # The update is that of one rank that computed it all.
    folder = Path(await job.cells[0].ask(SaveCheckpoint()))
    assert check(folder) == 1
    saved = parameters(AutoModelForCausalLM.from_pretrained(folder))
    alone = await asyncio.to_thread(partial(by_one_rank, job.setup, shm.with_name("alone")))
    untrained = parameters(AutoModelForCausalLM.from_pretrained(even_policy_folder))
    for found, expected, old in zip(saved, alone, untrained, strict=True):
        assert not torch.equal(found, old)
        torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-5)

    # Published, and back to rollout: all engines of both cells have the new weights.
    assert await job.cells[0].ask(Publish()) == 1
    changed = await job.change(EnterRollout())
    assert [(c.cell, c.role, c.version) for c in changed] == [(0, "rollout", 1), (1, "rollout", 1)]
    after = await answers(job)
    assert {tokens for tokens, _, _ in after} == {greedy(folder)}
    assert {tuple(versions) for _, _, versions in after} == {(1,)}
    assert before[0][1] != after[0][1]
    for _, logprobs, _ in after:
        assert logprobs == pytest.approx(after[0][1], abs=1e-5)

    statuses = [await cell.ask(GetStatus()) for cell in job.cells]
    assert [(s.cell, s.role, s.version, s.micro_steps) for s in statuses] == [
        (0, "rollout", 1, 1),
        (1, "rollout", 1, 1),
    ]
    # Nothing of the step is left but the weights that are in use. Engines that are awake have KV there, and a
    # socket each that others reach it by.
    assert [name for name in os.listdir(shm) if not name.startswith(("kv-", "spare-", "."))] == ["w1"]

    await a_rank_is_killed_within_a_call(job)


async def a_rank_is_killed_within_a_call(job: TwoCells) -> None:
    """One that follows: the call fails at once, and the cell ends for its supervisor."""
    died = await job.witness(job.cells[1])
    call = GenerateRequest(
        call="long",
        session="s",
        prompt_ids=PROMPT,
        prompt_tokens=len(PROMPT),
        sampling=SamplingParams(temperature=0.0, max_new_tokens=110),
    )
    pid = process_of("cell-1-rank-1.log", job.setup.log_folder)
    assert pid is not None
    async with asyncio.timeout(40.0):
        with pytest.raises((RemoteError, ActorDied)):
            async for _ in job.ups[1].engines[0].stream(Generate(request=call)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert "a rank died" in str(await died)
