"""What of a job stands between a harness and the policy, all of it real: sandbox, bridge, proxy, routes,
cells, trees, journal. Only the policy's answers are scripted."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from gyre.actors import Actor, ChildSpec, Down, Node, Ref, handles
from gyre.cell.engine import SamplingParams
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.scripted import NoWeights, PassTime, ScriptedEngine, at_once
from gyre.harness.bubblewrap import Bubblewrap
from gyre.harness.config import EvaluatorConfig, HarnessConfig
from gyre.harness.evaluator import Evaluator
from gyre.harness.execution import Begin, ExecutionActor, Surroundings
from gyre.harness.players import CommandPlayer
from gyre.harness.presets import Launch, launch_of
from gyre.harness.sandbox import limits_of
from gyre.harness.tasks import Task
from gyre.proxy import ProxyConfig
from gyre.proxy.actor import ProxyActorConfig
from gyre.proxy.keeper import ProxyKeeper
from gyre.rdma import SharedMemory
from gyre.rdma.shm_backend import ShmBackend
from gyre.schedule.messages import (
    CloseRoute,
    EvalDone,
    ExecutionFinished,
    ExecutionStarted,
    GroupFinished,
    OpenRoute,
)
from gyre.trajectory.actor import TrajectoryActor, TrajectoryActorConfig
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup, SetWaterlevel
from gyre.trajectory.records import ExecutionEnded, ExecutionOpened, ExecutionResult, ExecutionSpec
from tests.proxy.cells import Cell
from tests.real_harnesses.commands import MODEL
from tests.real_harnesses.engines import EngineLedger, SlowEngine
from tests.real_harnesses.policy import Policy, Speaker

WINDOW_TOKENS = 120_000
MAX_NEW_TOKENS = 2000
SAMPLING = SamplingConfig(draw="all")
# The score is the share of the files that are as the task wants them.
SCORE = """
import json, pathlib, sys
wanted = json.loads(pathlib.Path(sys.argv[2], "wanted.json").read_text())
found = {name: pathlib.Path(sys.argv[1], name) for name in wanted}
right = sum(path.is_file() and path.read_text() == wanted[name] for name, path in found.items())
print(right / len(wanted))
"""


class Told(Actor):
    """Takes what the actors of a job tell the waterlevel and the queue."""

    def __init__(self) -> None:
        self.groups: dict[str, AddGroup] = {}
        self.finished: dict[str, asyncio.Event] = {}

    @handles(ExecutionStarted)
    async def started_one(self, message: ExecutionStarted) -> None:
        """Nothing depends on it."""

    @handles(ExecutionFinished)
    async def finished_one(self, message: ExecutionFinished) -> None:
        """The group is waited for."""

    @handles(EvalDone)
    async def evaluated(self, message: EvalDone) -> None:
        """There is none."""

    @handles(AddGroup)
    async def add_group(self, message: AddGroup) -> None:
        self.groups[message.group] = message

    @handles(GroupFinished)
    async def group_finished(self, message: GroupFinished) -> None:
        self.finished.setdefault(message.group, asyncio.Event()).set()

    @handles(Down)
    async def mourn(self, message: Down) -> None:
        """Nothing is to be done."""


@dataclass
class Run:
    """A harness' run that is over."""

    execution: str
    folder: Path
    result: ExecutionResult

    @property
    def log(self) -> str:
        return (self.folder / "harness.log").read_text(errors="replace")


@dataclass
class Stage:
    node: Node
    folder: Path
    shm: Path
    ledger: EngineLedger
    proxy: Ref
    trajectory: Ref
    told: Told
    told_ref: Ref
    sandbox: Bubblewrap
    logs: list[Any]
    cells: list[Cell] = field(default_factory=list)
    groups: int = 0
    waits_s: Callable[[str], float] = lambda call: 0.0

    @property
    def journal(self) -> Path:
        return self.folder / "journal.db"

    async def add_cell(self, pass_s: PassTime) -> None:
        number = len(self.cells)
        shared = SharedMemory(self.shm)
        backend = ShmBackend(shared)
        await backend.start()
        engine = ScriptedEngine(
            partial(self.ledger.sample, number),
            vocab=20_000,
            window_tokens=WINDOW_TOKENS,
            kv_tokens=1_000_000,
            block_tokens=16,
            max_batch=16,
            eos_token_ids=(self.ledger.speaker.end,),
            step_tokens=32_768,
            pass_s=pass_s,
            open_weights=False,
            kv_home=KvHome(backend, shared, f"kv-cell{number}"),
        )
        cell = Cell(number, engine, backend)
        await engine.wake(NoWeights(0))
        spec = ChildSpec(
            name=f"engine-{number}",
            start=partial(SlowEngine, cell, lambda call: self.waits_s(call)),
            restart="temporary",
        )
        cell.ref = await self.node.spawn(spec)
        self.cells.append(cell)

    async def open_route(self, cell: Cell) -> None:
        assert cell.ref is not None
        await self.proxy.ask(
            OpenRoute(
                cell=cell.number,
                incarnation=cell.incarnation,
                engines=(cell.ref,),
                version=0,
                capacity_calls=16,
                window_tokens=WINDOW_TOKENS,
            )
        )

    def kill_proxy(self) -> None:
        """Its connections break; new ones wait until it is back."""
        started = [log for log in self.logs if log["event"] == "process_started"]
        os.kill(started[-1]["pid"], signal.SIGKILL)

    async def change_role(self, cell: Cell) -> None:
        """To train role and back."""
        await self.proxy.ask(CloseRoute(cell=cell.number, change=f"r{secrets.token_hex(4)}"))
        await cell.engine.sleep()
        await cell.engine.wake(NoWeights(0))
        await self.open_route(cell)

    async def play(self, config: HarnessConfig, prompt: str, wanted: dict[str, str]) -> Run:
        """Runs a harness on a task, as a job does: an execution of a group whose other member never was."""
        group, self.groups = f"g{self.groups:06d}", self.groups + 1
        spec = ExecutionSpec(
            execution=f"{group}.00",
            group=group,
            task="files",
            split="train",
            index=0,
            attempt=0,
            version_dispatched=0,
            group_executions=2,
            step=0,
        )
        task = Task(name="files", folder=self.folder / f"task-{group}", prompt=prompt)
        task.folder.mkdir()
        (task.folder / "wanted.json").write_text(json.dumps(wanted))
        ended = asyncio.get_running_loop().create_future()
        launch = await asyncio.to_thread(launch_of, config, WINDOW_TOKENS, MAX_NEW_TOKENS)
        forwarding = await self.node.spawn(self._forwarding(ended, group))
        around = self._surroundings(config, launch, forwarding)
        start = partial(ExecutionActor, spec, task, around)
        playing = await self.node.spawn(ChildSpec(name=spec.execution, start=start, restart="temporary"))
        await playing.tell(Begin())
        result = await ended
        await self._end_other(spec)
        return Run(spec.execution, self.folder / "executions" / spec.execution, result)

    def _forwarding(self, ended: asyncio.Future[ExecutionResult], group: str) -> ChildSpec:
        start = partial(Forwarding, self.trajectory, ended)
        return ChildSpec(name=f"forwarding-{group}", start=start, restart="temporary")

    def _surroundings(self, config: HarnessConfig, launch: Launch, trajectory: Ref) -> Surroundings:
        scoring = EvaluatorConfig(command=("{python}", "-c", SCORE, "{workspace}", "{task}"))
        return Surroundings(
            config=config,
            model=MODEL,
            player=CommandPlayer(config, launch, self.sandbox),
            evaluator=Evaluator(scoring, self.sandbox, limits_of(config)),
            folder=self.folder / "executions",
            guard=f"gyre-tests-{secrets.token_hex(4)}/",
            proxy=self.proxy,
            trajectory=trajectory,
            waterlevel=self.told_ref,
        )

    async def _end_other(self, spec: ExecutionSpec) -> None:
        """A group needs two, or there is no advantage and nothing is trained."""
        other = ExecutionSpec(
            execution=f"{spec.group}.01",
            group=spec.group,
            task=spec.task,
            split="train",
            index=1,
            attempt=0,
            version_dispatched=0,
            group_executions=2,
            step=0,
        )
        result = ExecutionResult(execution=other.execution, reason="never_started", score=-1.0, seconds=0.0)
        finished = self.told.finished.setdefault(spec.group, asyncio.Event())
        await self.trajectory.ask(ExecutionOpened(spec=other))
        await self.trajectory.ask(ExecutionEnded(spec=other, result=result))
        async with asyncio.timeout(30):
            await finished.wait()


class Forwarding(Actor):
    """Between an execution and the TrajectoryActor: learns how it ended."""

    def __init__(self, trajectory: Ref, ended: asyncio.Future[ExecutionResult]) -> None:
        self._trajectory = trajectory
        self._ended = ended

    @handles(ExecutionOpened)
    async def opened(self, message: ExecutionOpened) -> None:
        await self._trajectory.ask(message)

    @handles(ExecutionEnded)
    async def ended(self, message: ExecutionEnded) -> None:
        await self._trajectory.ask(message)
        self._ended.set_result(message.result)


@asynccontextmanager
async def stage(
    folder: Path, tokenizer: Path, shm: Path, policy: Policy, *, cells: int = 1, pass_s: PassTime = at_once
) -> AsyncIterator[Stage]:
    ledger = EngineLedger(Speaker(tokenizer, policy))
    sockets = folder / "s"
    async with AsyncExitStack() as stack:
        logs: list[Any] = stack.enter_context(structlog.testing.capture_logs())
        journal = await stack.enter_async_context(Journal(folder / "journal.db"))
        node = await stack.enter_async_context(Node(name="stage", where=str(folder)))
        told = Told()
        told_ref = await node.spawn(ChildSpec(name="told", start=lambda: told, restart="temporary"))
        config = TrajectoryActorConfig(
            sampling=SAMPLING, group_size=2, groups_per_step=1, micro_step_tokens=1 << 20
        )
        trajectory = await node.spawn(
            ChildSpec(name="trajectory", start=partial(TrajectoryActor, config, journal, told_ref))
        )
        await trajectory.ask(SetWaterlevel(ref=told_ref))
        proxy_config = ProxyActorConfig(
            proxy=ProxyConfig(keep_alive_s=2.0),
            tokenizer=tokenizer,
            sampling=SamplingParams(seed=7, max_new_tokens=MAX_NEW_TOKENS),
            window_tokens=WINDOW_TOKENS,
            model_name=MODEL,
            unix_socket=sockets / "proxy.sock",
        )
        start = partial(ProxyKeeper, proxy_config, trajectory, folder / "proxy.log")
        proxy = await node.spawn(ChildSpec(name="proxy", start=start))
        sandbox = Bubblewrap(folder / "sandbox")
        await asyncio.to_thread(sandbox.check)
        built = Stage(node, folder, shm, ledger, proxy, trajectory, told, told_ref, sandbox, logs)
        stack.push_async_callback(_close_cells, built)
        for _ in range(cells):
            await built.add_cell(pass_s)
            await built.open_route(built.cells[-1])
        yield built


async def _close_cells(built: Stage) -> None:
    for cell in built.cells:
        await cell.engine.close()
        await cell.backend.close()
    shutil.rmtree(built.shm, ignore_errors=True)
