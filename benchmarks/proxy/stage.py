"""A job's root as far as calls need it: journal and trajectory, a kept proxy, an engine and harnesses, each
in its process as in a job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.proxy.engine import Pace
from benchmarks.proxy.load import Target
from gyre.actors import Actor, Ask, ChildSpec, Node, ProcessSpec, Ref, handles
from gyre.cell.engine.base import SamplingParams
from gyre.proxy import OpenExecution, ProxyConfig
from gyre.proxy.actor import ProxyActorConfig
from gyre.proxy.keeper import ProxyKeeper
from gyre.schedule.messages import OpenRoute
from gyre.trajectory import SamplingConfig
from gyre.trajectory.actor import TrajectoryActor, TrajectoryActorConfig
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup
from gyre.trajectory.records import ExecutionOpened, ExecutionSpec

WINDOW_TOKENS = 2_000_000


class NoQueue(Actor):
    """No group is ever complete here."""

    @handles(AddGroup)
    async def add_group(self, message: AddGroup) -> None:
        raise RuntimeError(f"group {message.group} is complete")


@dataclass
class Stage:
    node: Node
    keeper: Ref
    trajectory: Ref
    engine: Ref
    load: Ref
    journal: Path
    group_size: int
    opened: int = 0

    async def ask(self, message: Ask[object]) -> object:
        return await self.keeper.ask(message)

    async def open(self, count: int) -> tuple[Target, ...]:
        """New executions."""
        targets = []
        for index in range(self.opened, self.opened + count):
            name = f"g000000.{index:04d}"
            spec = ExecutionSpec(
                execution=name,
                group="g000000",
                task="t",
                split="train",
                index=index,
                attempt=0,
                version_dispatched=0,
                group_executions=self.group_size,
                step=0,
            )
            await self.trajectory.ask(ExecutionOpened(spec=spec))
            access = await self.keeper.ask(OpenExecution(execution=name, attempt=0))
            host, _, port = access.base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
            path = "/v1/chat/completions"
            targets.append(Target(host=host, port=int(port), path=path, key=access.key))
        self.opened += count
        return tuple(targets)


@asynccontextmanager
async def stage(tokenizer: Path, folder: Path, pace: Pace) -> AsyncIterator[Stage]:
    """`folder` is for its journal and logs."""
    group_size = 1_000_000
    config = TrajectoryActorConfig(
        sampling=SamplingConfig(), group_size=group_size, groups_per_step=1, micro_step_tokens=1024
    )
    proxy_config = ProxyActorConfig(
        proxy=ProxyConfig(max_body_bytes=2**27),
        tokenizer=tokenizer,
        sampling=SamplingParams(max_new_tokens=pace.tokens),
        window_tokens=WINDOW_TOKENS,
        model_name="policy",
    )
    path = folder / "journal.db"
    async with Journal(path) as journal, Node(name="bench", where=str(folder)) as node:
        queue = await node.spawn(ChildSpec(name="queue", start=NoQueue))
        start = partial(TrajectoryActor, config, journal, queue)
        trajectory = await node.spawn(ChildSpec(name="trajectory", start=start))
        spec = ProcessSpec(name="engine", actor="benchmarks.proxy.engine:PacedEngine", config=pace)
        engine = await node.spawn(spec)
        load = await node.spawn(ProcessSpec(name="load", actor="benchmarks.proxy.load:Load"))
        start_proxy = partial(ProxyKeeper, proxy_config, trajectory, folder / "proxy.log")
        keeper = await node.spawn(ChildSpec(name="proxy", start=start_proxy))
        route = OpenRoute(
            cell=0,
            incarnation=1,
            engines=(engine,),
            version=0,
            capacity_calls=1024,
            window_tokens=WINDOW_TOKENS,
        )
        await keeper.ask(route)
        yield Stage(node, keeper, trajectory, engine, load, path, group_size)
