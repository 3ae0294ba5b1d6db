"""Two ranks of a core as they are in a job: processes with a gloo group over a store that is outside both."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gyre.actors import Ask, ChildSpec, Node, Ref
from gyre.cell.config import TrainConfig
from gyre.cell.engine.base import GenerateRequest, SamplingParams
from gyre.cell.messages import Generate
from gyre.cell.model import load_model, training_model
from gyre.cell.ranks import rank_process
from gyre.cell.store import GetStoreAddress, StoreActor, StoreConfig
from gyre.cell.train.trainer import Trainer
from gyre.cell.weights import Layout, parameters, shapes
from gyre.cell.worker_messages import (
    AddOwn,
    AddShard,
    BeginTraining,
    BuildGroup,
    CellSetup,
    CheckShard,
    CommitStep,
    DropGradients,
    DropGroup,
    EndTraining,
    LoadModel,
    SleepEngine,
    StagedShard,
    StageGradients,
    TrainMicroStep,
    WakeEngine,
    WorkerConfig,
    WriteCheckpoint,
    WriteSnapshot,
)
from gyre.loss import MicroStep, MicroStepStats
from gyre.rdma import RegionHandle, SharedMemory
from tests.cell.gradients import assert_same_gradients, gradients_by_formula
from tests.cell.parts import TEMPERATURE, cell_setup, micro_step, trajectory
from tests.run.jobs import logging_to

# The first test pays for two imports of torch.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

RANKS = 2
GROUP = [trajectory(seed, tokens=6 + 3 * seed, trained=0.6) for seed in range(5)]


class TwoRanks:
    def __init__(self, setup: CellSetup, store: Ref, workers: list[Ref]) -> None:
        self.setup = setup
        self.shared = SharedMemory(setup.shm_folder)
        self.workers = workers
        self._store = store
        self._groups = 0

    async def ask(self, message: Ask[Any]) -> list[Any]:
        return list(await asyncio.gather(*(worker.ask(message, timeout_s=60.0) for worker in self.workers)))

    async def build_group(self) -> None:
        address = await self._store.ask(GetStoreAddress())
        self._groups += 1
        prefix = f"cell0/life1/group{self._groups}"
        await self.ask(BuildGroup(host=address.host, port=address.port, prefix=prefix))

    async def begin(self, version: int) -> RegionHandle:
        """In train role with the masters' weights, as snapshot `version`."""
        region: RegionHandle = (await self.ask(WriteSnapshot(version=version)))[0]
        await self.ask(BeginTraining(version=version, region=region))
        return region

    async def train(self, *micro_steps: MicroStep) -> MicroStepStats:
        total = MicroStepStats()
        for one in micro_steps:
            for stats in await self.ask(TrainMicroStep(micro_step=one)):
                total += stats
        return total

    async def gradients(self, name: str) -> list[Tensor]:
        """What was accumulated, put together from both ranks' shards; they are forgotten and freed."""
        shards: list[StagedShard] = await self.ask(StageGradients(name=name))
        parts = [self.read_shard(rank, shard.region) for rank, shard in enumerate(shards)]
        for shard in shards:
            self.shared.free(shard.region)
        return [torch.cat(rows) for rows in zip(*parts, strict=True)]

    def read_shard(self, rank: int, region: RegionHandle) -> list[Tensor]:
        slots = Layout(self.shapes, torch.float32, rank, RANKS).slots
        rows = [(slot.rows[1] - slot.rows[0], *slot.shape[1:]) for slot in slots]
        return self._read(Layout(rows, torch.float32, 0, 1), region)

    def read(self, region: RegionHandle) -> list[Tensor]:
        return self._read(Layout(self.shapes, torch.float32, 0, 1), region)

    def _read(self, layout: Layout, region: RegionHandle) -> list[Tensor]:
        with self.shared.open(region) as source:
            return [view.clone() for view in layout.views(source.buffer)]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return shapes(self.policy())

    def policy(self) -> PreTrainedModel:
        return load_model(self.setup.model_folder, "float32", torch.device("cpu"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TwoRanks]:
    checkpoints = tmp_path_factory.mktemp("run") / "checkpoints"
    train = TrainConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as shm:
        setup = cell_setup(policy_folder, Path(shm), checkpoints, ranks=RANKS, train=train)
        async with Node(name="test") as node:
            store = await node.spawn(ChildSpec(name="store", start=lambda: StoreActor(StoreConfig())))
            configs = [WorkerConfig(setup=setup, cell=0, rank=rank, core=True) for rank in range(RANKS)]
            specs = [rank_process(config) for config in configs]
            workers = await asyncio.gather(*(node.spawn(spec) for spec in specs))
            made = TwoRanks(setup, store, workers)
            await made.ask(LoadModel())
            await made.build_group()
            yield made


def ranks(two: TwoRanks) -> list[Path]:
    """What the kernel says of the process of every rank."""
    pids = logging_to(two.setup.log_folder)
    return [Path(f"/proc/{pids[f'cell-0-rank-{rank}']}") for rank in range(RANKS)]


def parent_of(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def open_things(two: TwoRanks) -> list[tuple[int, int]]:
    """File descriptors and threads of every rank."""
    return [(len(os.listdir(of / "fd")), len(os.listdir(of / "task"))) for of in ranks(two)]


async def test_ranks_are_forked_by_what_has_torch_and_one_thread(two: TwoRanks) -> None:
    (parent,) = {of.parent / str(parent_of(of)) for of in ranks(two)}
    assert parent.name != str(os.getpid())
    assert "libtorch_cpu" in (parent / "maps").read_text()
    assert len(os.listdir(parent / "task")) == 1


async def test_ranks_write_one_snapshot_together(two: TwoRanks) -> None:
    regions = await two.ask(WriteSnapshot(version=0))
    assert regions[0] == regions[1]
    for found, expected in zip(two.read(regions[0]), parameters(two.policy()), strict=True):
        assert torch.equal(found, expected)


async def test_roles_change_again_and_again(two: TwoRanks) -> None:
    """20 times to train and back: no descriptor and no thread is left, and the group works each time."""
    (region, _) = await two.ask(WriteSnapshot(version=0))
    seen = []
    losses = set()
    for _ in range(20):
        await two.ask(SleepEngine())
        await two.build_group()
        await two.ask(BeginTraining(version=0, region=region))
        losses.add((await two.train(micro_step(*GROUP))).loss)
        await two.ask(EndTraining())
        await two.ask(DropGroup())
        await two.ask(WakeEngine(version=0, region=region))
        seen.append(open_things(two))
    await two.ask(SleepEngine())
    await two.build_group()
    assert len(losses) == 1
    assert all(things == seen[-1] for things in seen[3:]), seen


async def test_the_gradient_depends_neither_on_the_ranks_nor_on_the_cut(two: TwoRanks) -> None:
    await two.begin(0)
    policy = two.policy()
    model = training_model(policy, None)
    model.load_state_dict(policy.state_dict())
    alone = Trainer(model, two.setup.loss, TEMPERATURE, 0, 1)
    stats = alone.micro_step(micro_step(*GROUP))
    by_formula = gradients_by_formula(policy, GROUP, two.setup.loss, TEMPERATURE)
    first, *others = range(len(GROUP))
    cuts = [
        [micro_step(*GROUP)],
        # Of a batch of one the second rank has none.
        [msgspec.structs.replace(micro_step(*GROUP), batches=(tuple(others), (first,)))],
        [micro_step(*GROUP[:2]), micro_step(*GROUP[2:], index=1)],
        [micro_step(one, index=index) for index, one in enumerate(GROUP)],
    ]
    for index, cut in enumerate(cuts):
        both = await two.train(*cut)
        assert both.trajectories == len(GROUP) and both.trained_tokens == stats.trained_tokens
        assert both.loss == pytest.approx(stats.loss, rel=1e-5)
        found = await two.gradients(f"cut{index}")
        assert_same_gradients(found, alone.gradients)
        assert_same_gradients(found, by_formula)


async def test_a_loss_that_is_not_finite_is_named(two: TwoRanks) -> None:
    """It is the cell's end: neither the training module nor the group can be used again."""
    await two.begin(0)
    bad = trajectory(1, advantage=float("inf"))
    with pytest.raises(Exception, match=r"FloatingPointError: micro-step 0\.g000000\.5: the loss is"):
        # Both ranks have one, else the other would wait for it.
        await two.train(micro_step(bad, bad, index=5))
    await two.ask(EndTraining())
    await two.build_group()


async def test_a_step_is_adamw_with_clipping_over_both_ranks(two: TwoRanks) -> None:
    """The sum of the core's own contribution and a satellite's, of which each rank has its rows."""
    before = two.read(await two.begin(0))
    await two.train(micro_step(*GROUP[:3]))
    shards: list[StagedShard] = await two.ask(StageGradients(name="satellite"))
    theirs = [two.read_shard(rank, shard.region) for rank, shard in enumerate(shards)]
    for worker, shard in zip(two.workers, shards, strict=True):
        assert await worker.ask(CheckShard(region=shard.region, checksum=shard.checksum))
        assert not await worker.ask(CheckShard(region=shard.region, checksum=shard.checksum ^ 1))
        await worker.ask(AddShard(region=shard.region))
        two.shared.free(shard.region)
    await two.train(micro_step(*GROUP[3:], index=1))
    await two.ask(AddOwn())
    updates = await two.ask(CommitStep(version=1, scale=0.25))

    policy = two.policy()
    model = training_model(policy, None)
    model.load_state_dict(policy.state_dict())
    alone = Trainer(model, two.setup.loss, TEMPERATURE, 0, 1)
    alone.micro_step(micro_step(*GROUP[3:]))
    plain = [torch.nn.Parameter(weight.clone()) for weight in before]
    for parameter, own, rows in zip(plain, alone.gradients, zip(*theirs, strict=True), strict=True):
        parameter.grad = (own + torch.cat(rows)) * 0.25
    norm = torch.nn.utils.clip_grad_norm_(plain, 0.5)
    assert norm > 0.5, "nothing would be clipped"
    torch.optim.AdamW(plain, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1).step()

    assert updates[0] == updates[1]
    assert updates[0].grad_norm == pytest.approx(float(norm), rel=1e-5)
    for found, expected in zip(two.read(updates[0].region), plain, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)


async def test_a_checkpoint_holds_the_model_whole_and_every_ranks_rows(two: TwoRanks, tmp_path: Path) -> None:
    region: RegionHandle = (await two.ask(WriteSnapshot(version=7)))[0]
    await two.ask(WriteCheckpoint(folder=tmp_path, region=region))
    weights = two.read(region)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for found, expected in zip(parameters(model), weights, strict=True):
        assert torch.equal(found, expected)
    shards = [load_file(tmp_path / f"optimizer-{rank}.safetensors") for rank in range(RANKS)]
    for index, expected in enumerate(weights):
        assert torch.equal(torch.cat([shard[f"weight.{index}"] for shard in shards]), expected)


async def test_every_rank_is_an_engine_of_its_own(two: TwoRanks) -> None:
    await two.ask(EndTraining())
    region: RegionHandle = (await two.ask(WriteSnapshot(version=8)))[0]
    await two.ask(WakeEngine(version=8, region=region))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12)
    prompt = tuple(range(1, 9))
    request = GenerateRequest(
        call="c", session="s", prompt_ids=prompt, prompt_tokens=len(prompt), sampling=sampling
    )
    model = two.policy()
    for parameter, weight in zip(parameters(model), two.read(region), strict=True):
        parameter.data.copy_(weight)
    ids = torch.tensor([prompt])
    for _ in range(12):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], -1)
    for worker in two.workers:
        chunks = [chunk async for chunk in worker.stream(Generate(request=request))]
        assert [token for chunk in chunks for token in chunk.token_ids] == ids[0, len(prompt) :].tolist()
        assert {version for chunk in chunks for version in chunk.versions} == {8}
    await two.ask(SleepEngine())


async def test_what_is_dropped_is_gone(two: TwoRanks) -> None:
    await two.begin(9)
    await two.train(micro_step(*GROUP))
    await two.ask(DropGradients())
    assert not any(gradient.any() for gradient in await two.gradients("dropped"))
