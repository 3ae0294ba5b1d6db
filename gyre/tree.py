"""The supervisor tree of a job, from its resolved job file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import structlog

from gyre.actors import Actor, ChildSpec, ExitReason, ProcessSpec, Ref, Supervisor
from gyre.actors.forking.keeper import ForkServer
from gyre.actors.looking import CONTACT, offered
from gyre.cell import CellActorConfig
from gyre.cell.checkpoints import CheckpointFolder, step_of
from gyre.cell.engine.base import SamplingParams
from gyre.cell.model_folder import check_model_folder
from gyre.cell.ranks import RANK_MODULES, rank_environment
from gyre.cell.recipes import model_folder
from gyre.cell.satellites import JobFacts, Place, Satellites
from gyre.cell.store import StoreConfig
from gyre.cell.worker_messages import CellSetup
from gyre.cluster import listen, root_node
from gyre.harness.actor import HarnessActor, HarnessActorConfig
from gyre.job import Job
from gyre.proxy.actor import ProxyActorConfig
from gyre.proxy.keeper import ProxyKeeper
from gyre.proxy.messages import GetProxyTotals
from gyre.schedule import PolicyConfig, WaterlevelActor, WaterlevelActorConfig
from gyre.schedule.messages import Connect, Drain, GetSchedule, ScheduleStatus, WaitFinished
from gyre.trajectory.actor import TrajectoryActor, TrajectoryActorConfig
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import GetTotals, SetWaterlevel
from gyre.trajectory.queue import QueueConfig
from gyre.trajectory.queue_actor import GetQueueTotals, MicroStepQueue
from gyre.trajectory.rows import RewindSteps
from gyre.watch import Summary

log = structlog.get_logger()

FOREVER_S = float("inf")
DRAIN_S = 600.0
CELL_RESTARTS = 10
LONGEST_REASON = 600


class JobTree:
    """`async with JobTree(job, resume) as tree`: on leaving nothing of the job is left, no process, no port,
    no shared memory. Satellites are restarted; what cannot be (the core, the queue, the waterlevel) ends
    the job with an error, to be resumed."""

    def __init__(self, job: Job, resume: bool) -> None:
        self._job = job
        self._resume = resume
        self._stack = AsyncExitStack()
        # Short, because paths of sockets are bounded; the proxy's is in a folder that sandboxes can bind.
        self._sockets = Path("/tmp") / f"gyre-{_digest(job)}"
        self._node = root_node(job, self._sockets / "actors")
        self.checkpoint: Path | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        return await self._stack.__aexit__(*error)  # type: ignore[arg-type]

    def kill(self) -> None:
        """Ends everything at once, without asking: leaving the block is quick then."""
        self._node.kill()

    async def wait(self) -> None:
        """Until all steps are done, or the job was drained."""
        await self._waterlevel.ask(WaitFinished(), timeout_s=FOREVER_S)

    async def drain(self) -> None:
        """Writes a checkpoint of the last complete step; `wait` returns."""
        await self._waterlevel.ask(Drain(), timeout_s=DRAIN_S)

    async def status(self) -> ScheduleStatus:
        return await self._waterlevel.ask(GetSchedule())

    async def unsaved(self) -> int:
        """Complete steps that are in no checkpoint."""
        schedule = await self.status()
        return schedule.step - (schedule.saved or 0)

    async def summary(self, seconds: float) -> Summary:
        """What the job came to so far."""
        schedule = await self.status()
        queue = await self._queue.ask(GetQueueTotals())
        proxy = await self._proxy.ask(GetProxyTotals())
        totals = await self._trajectory.ask(GetTotals())
        scores = [entry.score for entry in totals.evals]
        return Summary(
            name=self._job.name,
            steps=schedule.step,
            seconds=round(seconds, 1),
            reward_first=scores[0] if scores else None,
            reward_last=scores[-1] if scores else None,
            role_changes=schedule.role_changes,
            role_changes_with_calls_in_flight=schedule.role_changes_with_calls_in_flight,
            satellite_micro_steps=queue.satellite_micro_steps,
            failed_calls=proxy.failed_calls,
            compactions=totals.compactions,
            sub_agents=totals.sub_agents,
            retries=totals.retries,
            tool_calls=totals.tool_calls,
            malformed_tool_calls=totals.malformed_tool_calls,
            trained_tokens=totals.trained_tokens,
            excluded_tokens=totals.excluded_tokens,
            groups_without_signal=totals.groups_without_signal,
            kv_sessions_moved=proxy.kv_sessions_moved,
            kv_sessions_recomputed=proxy.kv_sessions_recomputed,
            kv_sessions_rested=proxy.kv_sessions_rested,
            kv_bytes_moved=proxy.kv_bytes_moved,
            kv_move_s=round(proxy.kv_move_s, 3),
            checkpoint=schedule.checkpoint or (str(self.checkpoint) if self.checkpoint is not None else None),
        )

    # --- starting, in order ---------------------------------------------------------------------

    async def _start(self, stack: AsyncExitStack) -> None:
        job = self._job
        folder = await asyncio.to_thread(_model, job)
        first_step = await asyncio.to_thread(self._find_checkpoint)
        journal = await stack.enter_async_context(Journal(job.run_dir / "journal.db"))
        stack.enter_context(_own_folder(_shm_folder(job)))
        stack.enter_context(_own_folder(self._sockets, "actors", "proxy"))
        await stack.enter_async_context(self._node)
        await listen(self._node, job)
        await self._start_fork_server()
        try:
            await stack.enter_async_context(offered(self._node, job.run_dir / CONTACT))
        except OSError as error:
            log.warning("cannot_be_inspected", reason=str(error))
        if self._resume:
            await journal.write(RewindSteps(step=first_step))
        self._waterlevel = await self._spawn(
            "waterlevel", partial(WaterlevelActor, _waterlevel(job, first_step))
        )
        trajectory_config = TrajectoryActorConfig(
            sampling=job.sampling,
            group_size=job.train.group_size,
            groups_per_step=job.train.groups_per_step,
            micro_step_tokens=job.train.micro_step_tokens,
            ranks=job.cells.ranks,
            first_step=first_step,
        )
        queue_config = QueueConfig(
            groups_per_step=job.train.groups_per_step, first_step=first_step, lease_s=job.train.lease_s
        )
        self._queue = await self._spawn(
            "queue", partial(MicroStepQueue, queue_config, journal, self._waterlevel)
        )
        self._trajectory = await self._spawn(
            "trajectory", partial(TrajectoryActor, trajectory_config, journal, self._queue)
        )
        await self._trajectory.ask(SetWaterlevel(ref=self._waterlevel))
        window_tokens = _window_tokens(job, folder)
        proxy_config = _proxy(job, folder, window_tokens, self._sockets / "proxy" / "proxy.sock")
        log_path = job.run_dir / "logs" / "proxy.log"
        self._proxy = await self._spawn(
            "proxy", partial(ProxyKeeper, proxy_config, self._trajectory, log_path)
        )
        harness_config = HarnessActorConfig(
            harness=job.harness,
            tasks=job.tasks,
            evaluator=job.evaluator,
            eval=job.eval,
            group_size=job.train.group_size,
            run_dir=job.run_dir,
            window_tokens=window_tokens,
            max_new_tokens=job.rollout.max_new_tokens,
            first_group=first_step * job.train.groups_per_step,
        )
        start = partial(HarnessActor, harness_config, self._proxy, self._trajectory, self._waterlevel)
        harness = await self._spawn("harness", start, shutdown_s=30.0)
        await self._waterlevel.ask(Connect(proxy=self._proxy, harness=harness, queue=self._queue))
        await self._start_cells(folder)

    async def _spawn(self, name: str, start: Callable[[], Actor], shutdown_s: float = 10.0) -> Ref:
        spec = ChildSpec(name=name, start=start, restart="temporary", shutdown_s=shutdown_s)
        return await self._node.spawn(spec)

    async def _start_fork_server(self) -> None:
        """At once: what it imports takes longer than all else that is started before the ranks."""
        if self._node.fork_server:
            return
        environment = rank_environment(self._job.cluster.threads_per_rank)
        log_path = self._job.run_dir / "logs" / "fork-server.log"
        start = partial(ForkServer, RANK_MODULES, environment, log_path, self._sockets)
        await self._node.spawn(ChildSpec(name="fork-server", start=start))

    async def _start_cells(self, folder: Path) -> None:
        job = self._job
        logs = job.run_dir / "logs"
        store = ProcessSpec(
            name="store",
            actor="gyre.cell.store:StoreActor",
            config=StoreConfig(),
            log_path=logs / "store.log",
        )
        stores = await self._spawn("stores", partial(Supervisor, [store], max_restarts=CELL_RESTARTS))
        setup = _setup(job, folder, logs)
        here = Place(machine=None, slot=0, former_lives=0)
        core = await self._node.spawn(self._cell(setup, stores, None, 0, here))
        facts = JobFacts(name=job.name, paths=(folder, logs), threads_per_rank=job.cluster.threads_per_rank)
        spec = partial(self._cell, setup, stores, core)
        start = partial(Satellites, facts, job.cells.cells, job.cluster.nodes, logs, spec)
        await self._spawn("satellites", start, shutdown_s=30.0)

    def _cell(self, setup: CellSetup, stores: Ref, core: Ref | None, cell: int, place: Place) -> ProcessSpec:
        machine = place.machine
        if machine is not None:
            setup = msgspec.structs.replace(setup, shm_folder=machine.shm_folder)
            stores = machine.stores
        config = CellActorConfig(
            setup=setup,
            cell=cell,
            waterlevel=self._waterlevel,
            queue=self._queue,
            stores=stores,
            core=core,
            checkpoint=self.checkpoint if core is None else None,
            slot=place.slot,
            far=machine is not None,
        )
        return ProcessSpec(
            name=f"cell-{cell}",
            actor="gyre.cell.actor:CellActor",
            config=config,
            log_path=setup.log_folder / f"cell-{cell}.log",
            restart="temporary" if core is None else "permanent",
            shutdown_s=20.0,
            node=None if machine is None else machine.node,
            former_lives=place.former_lives,
        )

    def _find_checkpoint(self) -> int:
        """The step to go on from."""
        if not self._resume:
            return 0
        folder = self._job.run_dir / "checkpoints"
        self.checkpoint = CheckpointFolder(folder, self._job.checkpoint.keep).newest_whole()
        step = step_of(self.checkpoint) if self.checkpoint is not None else 0
        if self.checkpoint is None:
            why = f"{folder} has no whole checkpoint: steps are made again from the journal's executions"
            log.warning("resume_at_the_start", reason=why)
        log.info("resume", step=step, checkpoint=str(self.checkpoint or ""))
        return step


def reason(error: BaseException) -> str:
    """Why a job failed, for a person: where it began, in one line."""
    first = ExitReason.of(error).first
    # The messages of our own errors say what, where and what to do.
    ours = first.type_name.startswith("gyre.") and first.message
    text = " ".join((first.message if ours else first.brief).split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def _model(job: Job) -> Path:
    """The policy's folder, whole. Raises RecipeError, ModelFolderError."""
    if job.model.path is not None:
        check_model_folder(job.model.path)
        return job.model.path
    assert job.model.recipe is not None
    folder = model_folder(job.model.recipe)
    check_model_folder(folder, f"remove the folder, and {job.model.recipe} writes it again")
    return folder


def _waterlevel(job: Job, first_step: int) -> WaterlevelActorConfig:
    policy = PolicyConfig(
        burst_steps=job.schedule.burst_steps,
        lead_steps=job.schedule.lead_steps,
        groups_per_step=job.train.groups_per_step,
        group_size=job.train.group_size,
        eval_every=job.eval.every_steps,
        call_back=job.schedule.call_back,
    )
    return WaterlevelActorConfig(
        policy=policy,
        cells=job.cells.cells,
        steps=job.train.steps,
        first_step=first_step,
        checkpoint_every_steps=job.checkpoint.every_steps,
    )


def _window_tokens(job: Job, folder: Path) -> int:
    """For a prompt and its answer: what the job wants, as far as the model and the engines' KV have it."""
    positions = json.loads((folder / "config.json").read_bytes()).get("max_position_embeddings", 0)
    wanted = job.model.context_tokens
    window_tokens = min(wanted, job.rollout.kv_tokens, positions or wanted)
    if window_tokens < wanted:
        log.warning(
            "context_is_shorter",
            context_tokens=wanted,
            window_tokens=window_tokens,
            model_positions=positions or None,
            kv_tokens=job.rollout.kv_tokens,
        )
    return window_tokens


def _proxy(job: Job, folder: Path, window_tokens: int, unix_socket: Path) -> ProxyActorConfig:
    rollout = job.rollout
    return ProxyActorConfig(
        proxy=job.harness.proxy,
        tokenizer=folder,
        sampling=SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=job.seed,
            max_new_tokens=rollout.max_new_tokens,
        ),
        window_tokens=window_tokens,
        model_name="policy",
        unix_socket=unix_socket,
        kv_rests=rollout.kv_rest_bytes > 0,
    )


def _setup(job: Job, folder: Path, logs: Path) -> CellSetup:
    return CellSetup(
        model_folder=folder,
        shm_folder=_shm_folder(job),
        log_folder=logs,
        checkpoint_folder=job.run_dir / "checkpoints",
        model=job.model,
        cluster=job.cluster,
        cells=job.cells,
        rollout=job.rollout,
        train=job.train,
        loss=job.loss,
        checkpoint=job.checkpoint,
    )


def _shm_folder(job: Job) -> Path:
    return Path("/dev/shm") / f"gyre-{_digest(job)}"


@contextmanager
def _own_folder(path: Path, *subfolders: str) -> Iterator[None]:
    """Empty at first, gone in the end. Its name is made of the run folder's, whose journal is locked: what a
    killed job left there is ours to remove."""
    shutil.rmtree(path, ignore_errors=True)
    for folder in (path, *(path / name for name in subfolders)):
        folder.mkdir(mode=0o700)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _digest(job: Job) -> str:
    return hashlib.sha256(str(job.run_dir).encode()).hexdigest()[:12]
