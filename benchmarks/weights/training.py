"""What a core that trains loses while others pull from it."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import Report
from benchmarks.weights.models import SHAPES
from benchmarks.weights.puller import Enough, Pull, Puller, PullerConfig, Way
from gyre.actors import Actor, ChildSpec, Node, ProcessSpec, Ref, Supervisor, handles
from gyre.cell import CellActorConfig
from gyre.cell.config import (
    CellsConfig,
    CheckpointConfig,
    ClusterConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from gyre.cell.messages import CellUp, Claim, EnterTrain, HandOver, Idle, Lease, Stale, StepComplete
from gyre.cell.model import DTYPES
from gyre.cell.store import StoreConfig
from gyre.cell.worker_messages import CellSetup
from gyre.loss import LossConfig, MicroStep, Trajectory

SIZE = {"cpu": "0.135B", "cuda": "1B"}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
TOKENS = {"cpu": 32, "cuda": 4096}
# In a segment, and segments of each kind.
MICRO_STEPS = {"cpu": 3, "cuda": 30}
ROUNDS = 7
MOST_LOST = 0.02
START_TIMEOUT_S = 600.0


class Work(Actor):
    """Stands for the WaterlevelActor and the MicroStepQueue: there is always one more micro-step."""

    def __init__(self, tokens: int) -> None:
        self.up: asyncio.Future[CellUp] = asyncio.get_running_loop().create_future()
        self._claims = 0
        self._wanted: list[tuple[int, asyncio.Future[float]]] = []
        self._trajectory = trajectory(tokens)

    async def claimed(self, more: int) -> float:
        """When the core has claimed so many more."""
        then: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._wanted.append((self._claims + more, then))
        return await then

    @handles(CellUp)
    async def cell_up(self, message: CellUp) -> None:
        self.up.set_result(message)

    @handles(Claim, concurrent=True)
    async def claim(self, message: Claim) -> Lease | HandOver | StepComplete | Idle | Stale:
        self._claims += 1
        for count, then in self._wanted:
            if count == self._claims:
                then.set_result(perf_counter())
        name = f"g{self._claims:06d}"
        work = MicroStep(id=f"0.{name}.0", step=0, group=name, trajectories=(self._trajectory,))
        return Lease(token=self._claims, version=0, micro_step=work)


def trajectory(tokens: int) -> Trajectory:
    draw = random.Random(0)
    return Trajectory(
        execution="g000000.00",
        leaf=0,
        role="main",
        token_ids=struct.pack(f"<{tokens}i", *(draw.randrange(500) for _ in range(tokens))),
        trainable=bytes([0] + [1] * (tokens - 1)),
        old_logprobs=struct.pack(f"<{tokens}f", *([-4.0] * tokens)),
        versions=struct.pack(f"<{tokens}i", *([0] * tokens)),
        advantage=1.0,
        weight=1.0,
    )


def setup_of(model: Path, shm: Path, folder: Path, device: str) -> CellSetup:
    return CellSetup(
        model_folder=model,
        shm_folder=shm,
        log_folder=folder / "logs",
        checkpoint_folder=folder / "checkpoints",
        model=ModelConfig(path=model, dtype=DTYPE[device], context_tokens=TOKENS[device]),  # type: ignore[arg-type]
        cluster=ClusterConfig(device=device),  # type: ignore[arg-type]
        cells=CellsConfig(cells=1),
        rollout=RolloutConfig(kv_tokens=1024),
        train=TrainConfig(),
        loss=LossConfig(),
        checkpoint=CheckpointConfig(),
    )


class Bench:
    """A core in train role, and processes that pull from it when they are told to."""

    def __init__(self, node: Node, device: str, size: str) -> None:
        self._node = node
        self._device = device
        self._size = size
        self._work = Work(TOKENS[device])
        self._pullers: list[Ref] = []

    async def start(self, shm: Path, folder: Path) -> None:
        model = folder / "model"
        await asyncio.to_thread(self._write_model, model)
        work = await self._node.spawn(ChildSpec(name="work", start=lambda: self._work, restart="temporary"))
        store = ProcessSpec(name="store", actor="gyre.cell.store:StoreActor", config=StoreConfig())
        stores = await self._node.spawn(ChildSpec(name="stores", start=lambda: Supervisor([store])))
        config = CellActorConfig(
            setup=setup_of(model, shm, folder, self._device),
            cell=0,
            waterlevel=work,
            queue=work,
            stores=stores,
            core=None,
        )
        spec = ProcessSpec(name="core", actor="gyre.cell.actor:CellActor", config=config, restart="temporary")
        core = await self._node.spawn(spec)
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._work.up
        for number, device in enumerate(self._others(), 1):
            puller = PullerConfig(
                cell=number, core=core, shm=shm, here=shm / f"puller-{number}", device=device
            )
            name = f"puller-{number}"
            spec = ProcessSpec(name=name, actor=f"{Puller.__module__}:Puller", config=puller)
            self._pullers.append(await self._node.spawn(spec))
        await core.ask(EnterTrain(), timeout_s=START_TIMEOUT_S)

    async def quiet(self, micro_steps: int) -> float:
        """Seconds that a micro-step takes."""
        began = await self._work.claimed(1)
        return (await self._work.claimed(micro_steps) - began) / micro_steps

    async def pulling(self, micro_steps: int, way: Way) -> tuple[float, float]:
        """The same while others pull, and how often a second all of them did."""
        began = perf_counter()
        pulls = [asyncio.create_task(puller.ask(Pull(way=way), timeout_s=600.0)) for puller in self._pullers]
        took_s = await self.quiet(micro_steps)
        for puller in self._pullers:
            await puller.ask(Enough())
        count = sum(await asyncio.gather(*pulls))
        return took_s, count / (perf_counter() - began)

    def _others(self) -> list[str]:
        if self._device == "cpu":
            return ["cpu"]
        return [f"cuda:{gpu}" for gpu in range(1, torch.cuda.device_count())]

    def _write_model(self, folder: Path) -> None:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[self._size].config()))
        model.to(DTYPES[DTYPE[self._device]]).save_pretrained(folder)


async def measure_training(
    report: Report, console: Console, device: str, *, quick: bool, size: str | None = None
) -> None:
    """Segments take turns, each beside the quiet ones before and after it; the median counts. "alone": the
    same copies by the same processes, of memory that the core has nothing to do with. By TCP only where both
    ends have cores of their own."""
    ways: list[Way] = ["mapped", "alone"]
    if (os.cpu_count() or 1) >= 4:
        ways.append("tcp")
    micro_steps, rounds = (1, 1) if quick else (MICRO_STEPS[device], ROUNDS)
    seconds: dict[str, list[float]] = defaultdict(list)
    often: dict[str, list[float]] = defaultdict(list)
    lost: dict[str, list[float]] = defaultdict(list)
    console.print("training ...")
    with ExitStack() as stack:
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyre-bench-", dir="/dev/shm")))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyre-bench-")))
        async with Node(name="bench") as node:
            bench = Bench(node, device, size or SIZE[device])
            await bench.start(shm, folder)
            for way in ways:
                await bench.pulling(1, way)  # what is mapped and connected once
            before_s = await bench.quiet(micro_steps)
            for _ in range(rounds):
                for way in ways:
                    took_s, per_s = await bench.pulling(micro_steps, way)
                    after_s = await bench.quiet(micro_steps)
                    lost[way].append(1 - (before_s + after_s) / 2 / took_s)
                    seconds["quiet"].append(after_s)
                    seconds[way].append(took_s)
                    often[way].append(per_s)
                    before_s = after_s
    for name, samples in seconds.items():
        report.figure(f"training.micro_step_{name}_ms", median(samples) * 1e3)
    for name, samples in often.items():
        report.figure(f"training.{name}_per_s", median(samples))
    for name, samples in lost.items():
        report.figure(f"training.lost_{name}_ratio", median(samples))
        if name != "alone":
            report.at_most(f"training.lost_{name}_ratio", median(samples), MOST_LOST)
    beyond = [1 - alone / mapped for alone, mapped in zip(seconds["alone"], seconds["mapped"], strict=True)]
    report.at_most("training.lost_mapped_beyond_copying_ratio", median(beyond), MOST_LOST)
