"""A core and satellites behind a real proxy, with calls always in flight: what changes a satellite's role."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec

from gyre.actors import Actor, ChildSpec, Node, ProcessSpec, Ref, Supervisor, handles
from gyre.cell import CellActorConfig
from gyre.cell.config import (
    CellsConfig,
    CheckpointConfig,
    ClusterConfig,
    ModelConfig,
    RolloutConfig,
    SglangConfig,
    TrainConfig,
)
from gyre.cell.engine.base import SamplingParams
from gyre.cell.messages import CellUp, RoleState
from gyre.cell.store import StoreConfig
from gyre.cell.worker_messages import CellSetup
from gyre.loss import LossConfig, MicroStep, Trajectory
from gyre.proxy import CloseExecution, GetProxyTotals, OpenExecution, ProxyConfig, ProxyTotals
from gyre.proxy.actor import ProxyActor, ProxyActorConfig
from gyre.schedule.messages import MicroStepsReady
from gyre.schedule.roster import CellLife
from gyre.schedule.transitions import Change, Transitions
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup
from gyre.trajectory.queue import QueueConfig
from gyre.trajectory.queue_actor import MicroStepQueue
from gyre.trajectory.records import RecordCall

TIMEOUT_S = 600.0
START_TIMEOUT_S = 600.0


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: `calls` are in flight all the time, of up to `new_tokens` tokens."""

    model: Path
    device: Literal["cpu", "cuda"]
    engine: Literal["native", "sglang"] = "native"
    sglang: SglangConfig = SglangConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    cells: int = 2
    ranks: int = 1
    parallel: Literal["data", "tensor"] = "data"
    calls: int = 8
    new_tokens: int = 200
    context_tokens: int = 512
    kv_tokens: int = 16384
    train_tokens: int = 256


class Ears(Actor):
    """Stands for the WaterlevelActor: the benchmark decides."""

    def __init__(self) -> None:
        self.ups: asyncio.Queue[CellUp] = asyncio.Queue()

    @handles(CellUp)
    async def up(self, message: CellUp) -> None:
        self.ups.put_nowait(message)

    @handles(RoleState)
    async def state(self, message: RoleState) -> None:
        """The answer has it too."""

    @handles(MicroStepsReady)
    async def ready(self, message: MicroStepsReady) -> None:
        """What there is to do is what the benchmark gave."""


class Records(Actor):
    """Stands for the TrajectoryActor."""

    @handles(RecordCall, concurrent=True)
    async def record(self, message: RecordCall) -> None:
        """Nobody reads it."""


class SwitchJob:
    """The cells are up, all in rollout role."""

    def __init__(self, shape: Shape, node: Node, journal: Journal, folder: Path, shm: Path) -> None:
        self.shape = shape
        self.shm = shm
        self._node = node
        self._journal = journal
        self._folder = folder
        self._ears = Ears()
        self._lives: dict[int, CellLife] = {}
        self._groups = 0
        self._changes = 0
        self._answered = asyncio.Semaphore(0)

    async def start(self) -> None:
        ears = await self._spawn("waterlevel", self._ears)
        queue = MicroStepQueue(QueueConfig(groups_per_step=10**6), self._journal, ears)
        self._queue = await self._spawn("queue", queue)
        trajectory = await self._spawn("trajectory", Records())
        proxy = ProxyActor(self._proxy_config(), trajectory)
        self.proxy = await self._spawn("proxy", proxy)
        self._transitions = Transitions(self.proxy, TIMEOUT_S)
        store = ProcessSpec(name="store", actor="gyre.cell.store:StoreActor", config=StoreConfig())
        stores = await self._spawn("stores", Supervisor([store]))
        core: Ref | None = None
        for cell in range(self.shape.cells):
            config = CellActorConfig(
                setup=self._setup(),
                cell=cell,
                waterlevel=ears,
                queue=self._queue,
                stores=stores,
                core=core,
                slot=cell,
            )
            spec = ProcessSpec(
                name=f"cell-{cell}",
                actor="gyre.cell.actor:CellActor",
                config=config,
                restart="temporary",
                shutdown_s=20.0,
            )
            ref = await self._node.spawn(spec)
            core = core or ref
        async with asyncio.timeout(START_TIMEOUT_S):
            for _ in range(self.shape.cells):
                life = CellLife(await self._ears.ups.get())
                self._lives[life.cell] = life
                await self._transitions.admit(life, life.version)

    async def to_train(self, cell: int) -> Change:
        """With calls in flight at the cell: since it came, as many have begun as are in flight."""
        for _ in range(self.shape.calls):
            await self._answered.acquire()
        change = self._change(cell)
        await self._transitions.to_train(change)
        return change

    async def to_rollout(self, cell: int) -> Change:
        """In the middle of a micro-step."""
        self._groups += 1
        name = f"g{self._groups:06d}"
        work = MicroStep(id=f"0.{name}.0", step=0, group=name, trajectories=(self._trajectory(),))
        await self._queue.ask(AddGroup(group=name, step=0, executions=1, micro_steps=(work,)))
        change = self._change(cell)
        await self._transitions.to_rollout(change)
        self._answered = asyncio.Semaphore(0)
        return change

    async def totals(self) -> ProxyTotals:
        return await self.proxy.ask(GetProxyTotals())

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[None]:
        """Within it so many calls are in flight, and all are answered."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession() as http:
            callers = [tasks.create_task(self._call_on(http, n, over)) for n in range(self.shape.calls)]
            try:
                yield
            finally:
                over.set()
                await asyncio.wait(callers)

    async def _call_on(self, http: aiohttp.ClientSession, number: int, over: asyncio.Event) -> None:
        """One call after another, each of an execution of its own: it goes to the engine with the fewest."""
        turn = 0
        while not over.is_set():
            turn += 1
            name = f"g{turn:06d}.{number:02d}"
            access = await self.proxy.ask(OpenExecution(execution=name, attempt=0))
            headers = {"Authorization": f"Bearer {access.key}"}
            body = {"messages": [{"role": "user", "content": f"next: {number}.{turn}.csv"}]}
            async with http.post(f"{access.base_url}/chat/completions", headers=headers, json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            await self.proxy.ask(CloseExecution(execution=name))
            self._answered.release()

    def _change(self, cell: int) -> Change:
        self._changes += 1
        return Change(self._changes, self._lives[cell], "ordered by the benchmark")

    async def _spawn(self, name: str, actor: Actor) -> Ref:
        return await self._node.spawn(ChildSpec(name=name, start=lambda: actor, restart="temporary"))

    def _trajectory(self) -> Trajectory:
        draw, tokens = random.Random(self._groups), self.shape.train_tokens
        return Trajectory(
            execution="g000000.00",
            leaf=0,
            role="main",
            token_ids=struct.pack(f"<{tokens}i", *(draw.randrange(100) for _ in range(tokens))),
            trainable=bytes([0] + [1] * (tokens - 1)),
            old_logprobs=struct.pack(f"<{tokens}f", *([-4.0] * tokens)),
            versions=struct.pack(f"<{tokens}i", *([0] * tokens)),
            advantage=1.0,
            weight=1.0,
        )

    def _setup(self) -> CellSetup:
        shape = self.shape
        rollout = RolloutConfig(
            engine=shape.engine,
            parallel=shape.parallel,
            max_new_tokens=shape.new_tokens,
            kv_tokens=shape.kv_tokens,
            max_batch=max(8, shape.calls),
            sglang=shape.sglang,
        )
        return CellSetup(
            model_folder=shape.model,
            shm_folder=self.shm,
            log_folder=self._folder / "logs",
            checkpoint_folder=self._folder / "checkpoints",
            model=ModelConfig(path=shape.model, dtype=shape.dtype, context_tokens=shape.context_tokens),
            cluster=ClusterConfig(device=shape.device, threads_per_rank=1),
            cells=CellsConfig(cells=shape.cells, ranks=shape.ranks, capacity_executions=shape.calls),
            rollout=rollout,
            train=TrainConfig(),
            loss=LossConfig(),
            checkpoint=CheckpointConfig(),
        )

    def _proxy_config(self) -> ProxyActorConfig:
        return ProxyActorConfig(
            proxy=ProxyConfig(tool_format="plain"),
            tokenizer=self.shape.model,
            sampling=SamplingParams(seed=7, max_new_tokens=self.shape.new_tokens),
            window_tokens=self.shape.context_tokens,
            model_name="policy",
        )
