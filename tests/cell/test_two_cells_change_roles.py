"""Two cells of two ranks, processes all, change role again and again under calls through a real proxy; then
what can go wrong does. Every answer is what it was before anything happened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from benchmarks.switch.resources import Resources, look
from gyre.actors import Node
from gyre.cell.engine.base import SamplingParams
from gyre.cell.messages import GetStatus, TurnBack
from gyre.proxy import CloseExecution, GetProxyTotals, OpenExecution, ProxyConfig
from gyre.proxy.actor import ProxyActor, ProxyActorConfig
from gyre.schedule.roster import CellLife
from gyre.schedule.transitions import CellError, Change, Transitions
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup
from tests.cell.parts import cell_setup, micro_step, trajectory
from tests.cell.two_cells import TwoCells, process_of
from tests.proxy.scripted import KeepingTrajectory, Kept

ROUNDS = 10
CALLERS = 4
NEW_TOKENS = 100


class Elastic:
    """Both cells behind a proxy, in rollout role. `answers` of each prompt's calls, as sampled tokens."""

    def __init__(self, cells: TwoCells) -> None:
        self.cells = cells
        self.kept = Kept()
        self.changes = 0
        self.lives: list[CellLife] = []
        self.answers: dict[str, set[tuple[int, ...]]] = {}
        self._answered = asyncio.Semaphore(0)

    async def start(self) -> None:
        setup = self.cells.setup
        config = ProxyActorConfig(
            proxy=ProxyConfig(tool_format="plain", wait_s=30.0),
            tokenizer=setup.model_folder,
            sampling=SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS),
            window_tokens=setup.model.context_tokens,
            model_name="policy",
        )
        trajectory_ref = await self.cells.spawn("trajectory", KeepingTrajectory(self.kept))
        self.proxy = await self.cells.spawn("proxy", ProxyActor(config, trajectory_ref))
        self.transitions = Transitions(self.proxy, 60.0)
        self.lives = [CellLife(up) for up in self.cells.ups]
        for life in self.lives:
            await self.transitions.admit(life, 0)

    def change(self, cell: int) -> Change:
        self.changes += 1
        return Change(self.changes, self.lives[cell], "ordered by the test")

    async def there_and_back(self, cell: int) -> list[Change]:
        """With calls in flight at the cell, and a micro-step of its own."""
        await self.calls_were_answered(CALLERS)
        there, back = self.change(cell), self.change(cell)
        assert await self.transitions.to_train(there) == "done"
        name = f"g{back.id[1:]}"
        work = micro_step(trajectory(self.changes), group=int(back.id[1:]))
        await self.cells.queue_ref.ask(AddGroup(group=name, step=0, executions=1, micro_steps=(work,)))
        assert await self.transitions.to_rollout(back) == "done"
        return [there, back]

    async def calls_were_answered(self, count: int) -> None:
        self._answered = asyncio.Semaphore(0)
        for _ in range(count):
            await self._answered.acquire()

    @asynccontextmanager
    async def called(self) -> AsyncIterator[None]:
        """Within it calls are in flight."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession() as http:
            callers = [tasks.create_task(self._call(http, n, over)) for n in range(CALLERS)]
            try:
                yield
            finally:
                over.set()
                await asyncio.wait(callers)

    async def _call(self, http: aiohttp.ClientSession, caller: int, over: asyncio.Event) -> None:
        prompt, turn = f"next: {caller}.csv", 0
        while not over.is_set():
            turn += 1
            execution = f"g{turn:06d}.{caller:02d}"
            access = await self.proxy.ask(OpenExecution(execution=execution, attempt=0))
            async with http.post(
                f"{access.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {access.key}"},
                json={"messages": [{"role": "user", "content": prompt}]},
            ) as answer:
                assert answer.status == 200, await answer.text()
            await self.proxy.ask(CloseExecution(execution=execution))
            (record,) = [r for r in self.kept.records if r.execution == execution]
            self.answers.setdefault(prompt, set()).add(record.output_ids)
            self._answered.release()

    def assert_one_answer_a_prompt(self) -> None:
        assert len(self.answers) == CALLERS
        assert [len(answers) for answers in self.answers.values()] == [1] * CALLERS


@pytest.fixture
async def elastic(even_policy_folder: Path, shm: Path, tmp_path: Path) -> AsyncIterator[Elastic]:
    setup = cell_setup(even_policy_folder, shm, tmp_path / "checkpoints", ranks=2)
    async with Journal(tmp_path / "journal.db") as journal, Node(name="test") as node:
        cells = TwoCells(setup, node, journal, groups_per_step=1000)
        await cells.start(pull_timeout_s=0.5)
        made = Elastic(cells)
        await made.start()
        yield made


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_calls_see_nothing_of_role_changes_and_of_what_fails_in_them(
    elastic: Elastic, shm: Path
) -> None:
    async with elastic.called():
        await elastic.calls_were_answered(2 * CALLERS)
        await roles_change_again_and_again(elastic, shm)
        await the_core_is_busy(elastic)
        await an_opposite_order_comes(elastic)
        await a_rank_is_killed(elastic)
        await elastic.calls_were_answered(CALLERS)
    elastic.assert_one_answer_a_prompt()
    totals = await elastic.proxy.ask(GetProxyTotals())
    assert totals.failed_calls == 0 and totals.reroutes >= ROUNDS // 2
    # What is left is the core's: weights and the memory of the next, its engines' KV, and sockets.
    assert [name for name in os.listdir(shm) if not name.startswith((".", "kv-0-", "spare-"))] == ["w0"]


async def roles_change_again_and_again(elastic: Elastic, shm: Path) -> None:
    """20 changes; what stands after the first ones is all that ever stands."""
    held: list[Resources] = []
    moved = 0
    for turn in range(ROUNDS):
        there, back = await elastic.there_and_back(1 - turn % 2)
        moved += there.calls
        assert list(back.states_s)[:2] == ["finish_micro_step", "hand_over_contribution"]
        held.append(look(shm, cuda=False, here=False))
    assert moved >= ROUNDS // 2
    # Links between processes, and threads, are made when first needed: benchmarks.switch shows over fifty
    # changes that they end growing. One left by each change would be 10 here.
    for name, slack in (("processes", 0), ("regions", 0), ("threads", 6), ("sockets", 9), ("descriptors", 9)):
        seen = [getattr(sample, name) for sample in held]
        assert min(seen[-2:]) <= max(seen[2:4]) + slack, (name, seen)


async def the_core_is_busy(elastic: Elastic) -> None:
    """Too long for a change to train: the satellite goes back, as soon as it gets weights again."""
    change = elastic.change(1)
    core = elastic.cells.pid("cell-0")
    os.kill(core, signal.SIGSTOP)
    try:
        changing = asyncio.create_task(elastic.transitions.to_train(change))
        told = await elastic.cells.waterlevel.passed(change.id, "pull_training_weights")
        assert told.cause == "the core gave no weights within 0.5 s"
    finally:
        os.kill(core, signal.SIGCONT)
    assert await changing == "failed"
    assert list(change.states_s)[-5:] == [
        "end_training",
        "drop_group",
        "pull_published_weights",
        "wake_engines",
        "open_route",
    ]
    await elastic.there_and_back(1)


async def an_opposite_order_comes(elastic: Elastic) -> None:
    """While the satellite waits for weights."""
    change = elastic.change(1)
    core = elastic.cells.pid("cell-0")
    os.kill(core, signal.SIGSTOP)
    try:
        changing = asyncio.create_task(elastic.transitions.to_train(change))
        await elastic.cells.waterlevel.passed(change.id, "build_group")
        await elastic.cells.cells[1].tell(TurnBack(change=change.id, cause="w=9 > C_R=8"))
        await elastic.cells.cells[1].ask(GetStatus())
    finally:
        os.kill(core, signal.SIGCONT)
    assert await changing == "turned_back"
    assert "begin_training" not in change.states_s
    await elastic.there_and_back(1)


async def a_rank_is_killed(elastic: Elastic) -> None:
    """Of the satellite, on its way to train: the cell ends, for its supervisor."""
    await elastic.calls_were_answered(CALLERS)
    change = elastic.change(1)
    died = await elastic.cells.witness(elastic.cells.cells[1])
    changing = asyncio.create_task(elastic.transitions.to_train(change))
    await elastic.cells.waterlevel.passed(change.id, "sleep_engines")
    os.kill(elastic.cells.pid("cell-1-rank-1"), signal.SIGKILL)
    with pytest.raises(CellError, match="cell 1"):
        await changing
    await died
    logs = ("cell-1-rank-0.log", "cell-1-rank-1.log")
    assert [process_of(log, elastic.cells.setup.log_folder) for log in logs] == [None] * 2
