"""The HarnessActor: turns dispatches into executions, and keeps so many of them running."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gyre.actors import Actor, ChildSpec, Down, Ref, Supervisor, Tell, handles
from gyre.harness.commands import check_program
from gyre.harness.config import EvalConfig, EvaluatorConfig, HarnessConfig, TasksConfig, scorers
from gyre.harness.evaluator import Evaluator
from gyre.harness.execution import JOURNAL_S, Begin, ExecutionActor, Surroundings
from gyre.harness.far import FarConfig, JoinHarness, LeaveHarness, PlacingPlayer
from gyre.harness.host import host_spec
from gyre.harness.machines import Machines
from gyre.harness.numbering import Numbering, Planned
from gyre.harness.places import Places
from gyre.harness.players import ActorPlayer, CommandPlayer, Player
from gyre.harness.presets import launch_of
from gyre.harness.process import start_guardian
from gyre.harness.sandbox import Sandbox, limits_of
from gyre.harness.sandboxes import sandboxes_by_name
from gyre.harness.task import INSIDE, Task, TasksError
from gyre.harness.tasks import BUNDLED, load_bundled, load_tasks, write_recipe
from gyre.schedule.messages import Dispatch, ExecutionFinished, ExecutionsDispatched
from gyre.trajectory.messages import GetResume
from gyre.trajectory.records import ExecutionEnded, ExecutionResult

log = structlog.get_logger()

EXECUTION_SHUTDOWN_S = 20.0
# A user's actor that dies more often ends the job.
HOST_RESTARTS = 10
HOST_WINDOW_S = 600.0


class HarnessActorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`first_group` is the number of the first group that is not trained yet, `model` the name by which
    harnesses ask for the policy, which has `window_tokens` for a prompt and its answer, and answers at most
    `max_new_tokens`. Paths in the tables are absolute."""

    harness: HarnessConfig
    tasks: TasksConfig
    evaluator: EvaluatorConfig
    eval: EvalConfig
    group_size: int
    run_dir: Path
    model: str = "policy"
    window_tokens: int = 2048
    max_new_tokens: int = 256
    first_group: int = 0


class PlacesCame(Tell, frozen=True, kw_only=True):
    """The HarnessActor to itself."""


class HarnessActor(Actor):
    """State: which numbers are used, which executions wait for a place, which run."""

    def __init__(self, config: HarnessActorConfig, proxy: Ref, trajectory: Ref, waterlevel: Ref) -> None:
        self._config = config
        self._proxy = proxy
        self._trajectory = trajectory
        self._waterlevel = waterlevel
        self._waiting: deque[Planned] = deque()
        self._running: dict[Ref, Planned] = {}
        self._places = Places(config.harness.concurrent if config.harness.here else 0)
        self._guardian: subprocess.Popen[bytes] | None = None

    async def started(self) -> None:
        """Raises TasksError, ProgramMissing, PresetMissing, SandboxMissing, SpawnFailed (of a user's actor):
        faults of the job file or the machine."""
        tasks, held_out = await asyncio.to_thread(self._load)
        guard = f"{secrets.token_hex(8)}/"
        if self._config.harness.actor is None:
            check_walls((*tasks, *held_out), self._config.harness.sandbox)
        sandboxes = await asyncio.to_thread(self._sandboxes)
        evaluator = self._evaluator(sandboxes)
        await asyncio.to_thread(evaluator.check, [task.folder for task in (*tasks, *held_out)])
        self._guardian = start_guardian(guard)
        player = PlacingPlayer(self._places, await self._player(guard, sandboxes))
        self._around = self._surroundings(guard, evaluator, player)
        self._machines = Machines(self.context, self._places, self._proxy, self._far())
        if not self._places.total:
            log.info("waiting_for_harness_machines")
        resume = await self._trajectory.ask(GetResume(), timeout_s=JOURNAL_S)
        self._numbering = Numbering(
            tasks,
            held_out,
            seed=self._config.tasks.seed,
            group_size=self._config.group_size,
            runs=self._config.eval.runs,
            first_group=self._config.first_group,
            resume=resume,
        )

    async def stopping(self) -> None:
        await asyncio.gather(*(self.context.stop_child(ref) for ref in self._running))
        if self._guardian is not None:
            await asyncio.to_thread(self._guardian.communicate)

    def summary(self) -> Mapping[str, Any]:
        return {"running": len(self._running), "waiting": len(self._waiting)}

    @handles(Dispatch)
    async def dispatch(self, message: Dispatch) -> None:
        if message.split == "eval":
            planned, groups = self._numbering.evaluation(message.version, message.step), 1
        else:
            planned = self._numbering.groups(message.groups, message.version, message.step)
            groups = message.groups
        await self._waterlevel.tell(
            ExecutionsDispatched(split=message.split, executions=len(planned), groups=groups)
        )
        self._waiting.extend(planned)
        await self._start_waiting()

    @handles(JoinHarness, concurrent=True)
    async def join(self, message: JoinHarness) -> None:
        await self._machines.join(message)
        await self.context.ref.tell(PlacesCame())

    @handles(LeaveHarness, concurrent=True)
    async def leave(self, message: LeaveHarness) -> None:
        await self._machines.leave(message)

    @handles(PlacesCame)
    async def places_came(self, _: PlacesCame) -> None:
        await self._start_waiting()

    @handles(Down)
    async def down(self, message: Down) -> None:
        if self._machines.lost(message):
            return
        planned = self._running.pop(message.ref)
        if message.reason.abnormal:
            await self._drop(planned, str(message.reason))
        await self._start_waiting()

    async def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self._places.total:
            planned = self._waiting.popleft()
            ref = await self.context.spawn(
                ChildSpec(
                    name=planned.spec.execution,
                    start=partial(ExecutionActor, planned.spec, planned.task, self._around),
                    restart="temporary",
                    shutdown_s=EXECUTION_SHUTDOWN_S,
                )
            )
            self.context.monitor(ref)
            self._running[ref] = planned
            await ref.tell(Begin())

    async def _drop(self, planned: Planned, why: str) -> None:
        """An execution crashed for a fault of ours: the others go on."""
        spec = planned.spec
        log.error("execution_crashed", execution=spec.execution, reason=why)
        result = ExecutionResult(
            execution=spec.execution, reason="harness_error", score=None, seconds=0.0, detail=why
        )
        await self._trajectory.ask(ExecutionEnded(spec=spec, result=result), timeout_s=JOURNAL_S)
        await self._waterlevel.tell(ExecutionFinished(execution=spec.execution, split=spec.split))

    def _load(self) -> tuple[Sequence[Task], Sequence[Task]]:
        folder = self._config.run_dir / "tasks"
        tasks = source_tasks(self._config.tasks, folder / "train")
        evaluation = self._config.eval
        has_source = any((evaluation.path, evaluation.recipe, evaluation.bundled))
        return tasks, source_tasks(evaluation, folder / "eval") if has_source else ()

    def _sandboxes(self) -> dict[str, Sandbox]:
        """Blocking: looks for what the job file names."""
        config = self._config
        for table, scorer in scorers(config.evaluator):
            if scorer.command:
                check_program(f"{table}.command", scorer.command)
        sandboxes = sandboxes_by_name(config.run_dir / "sandbox")
        # A judge runs nothing.
        alone = all(scorer.judge is not None for _, scorer in scorers(config.evaluator))
        used = set() if alone else {config.evaluator.sandbox}
        if config.harness.actor is None and config.harness.here:
            used.add(config.harness.sandbox)
        for name in used:
            sandboxes[name].check()
        (config.run_dir / "executions").mkdir(parents=True, exist_ok=True)
        return sandboxes

    async def _player(self, guard: str, sandboxes: dict[str, Sandbox]) -> Player | None:
        """None where no execution is played on this machine."""
        config = self._config.harness
        if not config.here:
            return None
        if config.actor is None:
            facts = self._config
            launch = await asyncio.to_thread(launch_of, config, facts.window_tokens, facts.max_new_tokens)
            return CommandPlayer(config, launch, sandboxes[config.sandbox])
        spec = host_spec(config, f"{guard}actor", self._config.run_dir / "logs" / "harness.log")
        start = partial(Supervisor, [spec], max_restarts=HOST_RESTARTS, window_s=HOST_WINDOW_S)
        # The oldest child is stopped last, when no execution needs it any more.
        hosts = await self.context.spawn(
            ChildSpec(name="hosts", start=start, restart="temporary", shutdown_s=EXECUTION_SHUTDOWN_S)
        )
        return ActorPlayer(config, hosts)

    def _far(self) -> FarConfig:
        config = self._config
        return FarConfig(
            harness=config.harness,
            window_tokens=config.window_tokens,
            max_new_tokens=config.max_new_tokens,
            folder=config.run_dir / "executions",
        )

    def _evaluator(self, sandboxes: dict[str, Sandbox]) -> Evaluator:
        config = self._config.evaluator
        return Evaluator(config, sandboxes[config.sandbox], limits_of(self._config.harness))

    def _surroundings(self, guard: str, evaluator: Evaluator, player: Player) -> Surroundings:
        config = self._config
        return Surroundings(
            config=config.harness,
            model=config.model,
            player=player,
            evaluator=evaluator,
            folder=config.run_dir / "executions",
            guard=guard,
            proxy=self._proxy,
            trajectory=self._trajectory,
            waterlevel=self._waterlevel,
        )


def source_tasks(config: TasksConfig | EvalConfig, written: Path) -> Sequence[Task]:
    """The tasks of a table; a recipe's are written into `written`, once. Blocking. Raises TasksError."""
    if config.recipe is not None:
        write_recipe(config.recipe, written, config.count, config.seed)
    if config.bundled:
        return load_bundled(config.bundled)
    return load_tasks(source_folder(config, written))


def source_folder(config: TasksConfig | EvalConfig, written: Path) -> Path:
    """Where the folders of a table's tasks lie."""
    if config.bundled:
        return BUNDLED
    return config.path or written


def check_walls(tasks: Iterable[Task], sandbox: str) -> None:
    """Raises TasksError."""
    for task in tasks:
        if task.inside != INSIDE and sandbox != "bubblewrap":
            fix = "set harness.sandbox to 'bubblewrap'"
            raise TasksError(str(task.folder), f"has its workspace at {task.inside}", fix)
