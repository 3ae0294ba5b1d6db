"""A fault in each state of a role change, under streams through the real proxy: every call is answered as if
nothing had happened, the counters say what was computed again, and nothing is left.

Two cells of two ranks, all of them processes, change role twenty times first, and play some of the faults.
GYRE_TEST_FAULTS=3x1 plays all faults, of three cells of one rank; 2x2 those that two cells outlive."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
import structlog

from benchmarks.switch.resources import Resources, look
from gyre.actors import Node, Ref
from gyre.cell.engine.base import GenerateRequest, SamplingParams
from gyre.cell.messages import ExportKv, Generate, ReleaseKv
from gyre.cell.role_change import WAKE
from gyre.schedule.state import ToRollout, ToTrain
from gyre.trajectory.journal import Journal
from tests.cell.fault_job import (
    AT_THE_PROXY,
    DEVICE,
    LEAVING,
    RETURNING,
    Action,
    Event,
    FaultJob,
    http,
    named,
)
from tests.cell.fault_streams import Streams
from tests.cell.severing import sever

ALL = "GYRE_TEST_FAULTS" in os.environ
CELLS, RANKS = (int(count) for count in os.environ.get("GYRE_TEST_FAULTS", "2x2").split("x"))
CHANGES = 20
# New calls go to the last cell first, and those of one that leaves to the last that stays.
LEAVES, TAKES = CELLS - 1, CELLS - 2
CORE, CELL = "cell-0", f"cell-{LEAVES}"
SOURCES = tuple(f"cell-{LEAVES}-rank-{rank}" for rank in range(RANKS))
DESTINATIONS = tuple(f"cell-{TAKES}-rank-{rank}" for rank in range(RANKS))

# Who has to answer before a state can end; the others are as good as instants.
WAITS_FOR = {
    **dict.fromkeys(("pin", "cancel", "migrate", "migrate_idle", "sleep_engines", "build_group"), SOURCES),
    **dict.fromkeys(("begin_training", "finish_micro_step", "end_training", "drop_group"), SOURCES),
    **dict.fromkeys(("pull_training_weights", "hand_over_contribution", "pull_published_weights"), (CORE,)),
    "wake_engines": SOURCES,
}
DEADLY = ("rank", "cell", "destination")


class Case(NamedTuple):
    state: str
    fault: str


def all_cases() -> list[Case]:
    """Those that end a process come last."""
    cases = [Case(state, fault) for state in (*LEAVING, *RETURNING) for fault in ("rank", "cell", "link")]
    if TAKES > 0:  # without its core a job ends
        cases += [Case(state, "destination") for state in (*AT_THE_PROXY, "sleep_engines", "wake_engines")]
    cases += [Case("migrate", "lane"), Case("migrate_idle", "lane")]
    cases += [Case("migrate", "corrupt"), Case("migrate", "full"), Case("pull_training_weights", "busy")]
    # On its last state a change is done.
    cases += [Case(state, "opposite") for state in (*LEAVING[:-1], *RETURNING[:-2])]
    return sorted(cases, key=lambda case: case.fault in DEADLY)


SOME = (
    Case("pin", "link"),
    Case("migrate", "lane"),
    Case("migrate", "corrupt"),
    Case("migrate", "full"),
    Case("pull_training_weights", "busy"),
    Case("pull_training_weights", "opposite"),
    Case("migrate", "rank"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]


class World(NamedTuple):
    job: FaultJob
    streams: Streams


@pytest.fixture(scope="module")
def module_shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as parent:
        yield Path(parent) / "regions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory, module_shm: Path) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        journal = await stack.enter_async_context(Journal(folder / "journal.db"))
        node = await stack.enter_async_context(Node(name="test"))
        session = await stack.enter_async_context(http())
        job = FaultJob(node, journal, folder, module_shm, cells=CELLS, ranks=RANKS)
        listen_to(job)
        patch.setattr("gyre.schedule.actor.decide", job.decisions.decide)
        patch.setattr("gyre.schedule.actor.turns_back", job.decisions.turns_back)
        await job.start()
        streams = Streams(job, session)
        await streams.learn()
        yield World(job, streams)
    # What lies in the folder goes with it, as in a job.
    assert job.regions() <= job.regions_at_first
    assert job.processes() == {}


def listen_to(job: FaultJob) -> None:
    structlog.configure(processors=[structlog.processors.format_exc_info, job.note])


@pytest.fixture
def world(whole: World) -> World:
    listen_to(whole.job)
    return whole


@pytest.mark.skipif(ALL, reason="all faults take long enough")
async def test_two_cells_of_two_ranks_change_role_twenty_times(world: World) -> None:
    """With streams in flight at the cell, and a micro-step of its own."""
    job, streams = world
    held: list[Resources] = []
    moved = 0
    async with streams.called():
        for change in range(CHANGES // 2):
            await streams.reach(cell := 1 - change % 2)
            there = await job.change(ToTrain, cell)
            await job.add_work()
            back = await job.change(ToRollout, cell)
            assert [named(events, "role_change")[0]["outcome"] for events in (there, back)] == [
                "done",
                "done",
            ]
            moved += named(there, "role_change")[0]["calls_in_flight"]
            held.append(look(job.shm, cuda=DEVICE == "cuda", here=False))
    assert streams.wrong == []
    assert named(job.events, "call_failed") == []
    assert moved >= CHANGES // 2
    # Links between processes, and threads, are made when first needed: benchmarks.switch shows over fifty
    # changes that they end growing. One left by each change would be 10 here.
    for name, slack in (("processes", 0), ("regions", 0), ("threads", 6), ("sockets", 9), ("descriptors", 9)):
        seen = [getattr(sample, name) for sample in held]
        assert min(seen[-2:]) <= max(seen[2:4]) + slack, (name, seen)
    await check_nothing_is_left(job)


@pytest.mark.skipif(DEVICE == "cuda", reason="faults are of processes")
@pytest.mark.parametrize("case", all_cases() if ALL else SOME, ids="-".join)
async def test_every_call_is_answered(world: World, case: Case) -> None:
    job, streams = world
    await job.all_roll_out()
    await job.forget_kv()
    if case.fault == "full":
        events = await into_a_full_one(job, streams)
    else:
        async with streams.called(), streams.idle():
            events = await play(job, streams, case)
    for e in events:
        print({k: (v if len(str(v)) < 300 else str(v)[:300]) for k, v in e.items()})
    assert streams.wrong == []
    check_outcome(events, case)
    check_counters(events, case)
    if ALL or case.fault not in DEADLY:
        await job.all_roll_out()
        await check_nothing_is_left(job)


# --- faults ---------------------------------------------------------------------------------------


async def play(job: FaultJob, streams: Streams, case: Case) -> list[Event]:
    """The change, with the fault in that state of it."""
    await streams.reach(LEAVES)
    if case.state in LEAVING:
        return await faulty(job, case, ToTrain, ToRollout)
    await job.change(ToTrain, LEAVES)
    if case.fault in DEADLY and case.state in ("finish_micro_step", "hand_over_contribution"):
        # Before there is anything to do.
        for name in WAITS_FOR[case.state]:
            os.kill(job.pid(name), signal.SIGSTOP)
    await job.add_work()
    return await faulty(job, case, ToRollout, ToTrain)


async def faulty(job: FaultJob, case: Case, to: Any, opposite: Any) -> list[Event]:
    state = case.state
    waits_for = WAITS_FOR.get(state, ())
    begins: dict[str, Action] = {
        "rank": lambda: job.kill(SOURCES[-1], waits_for),
        "cell": lambda: job.kill(CELL, waits_for),
        "destination": lambda: job.kill(DESTINATIONS[-1], DESTINATIONS if waits_for == SOURCES else ()),
        "link": lambda: job.in_the_midst((), lambda: cut_link(job, state)),
        "lane": lambda: job.in_the_midst(SOURCES, lambda: cut_lane(job)),
        "corrupt": lambda: corrupt(job),
        "busy": lambda: os.kill(job.pid(CORE), signal.SIGSTOP),
    }
    over: dict[str, Action] = {
        "corrupt": lambda: corrupt(job),
        "opposite": lambda: job.turn_back(opposite, LEAVES),
        "busy": lambda: os.kill(job.pid(CORE), signal.SIGCONT),
    }
    return await job.change(to, LEAVES, state=state, begins=begins.get(case.fault), over=over.get(case.fault))


def cut_link(job: FaultJob, state: str) -> None:
    """Over which the root reaches the cell; while calls are handed over that to its engines."""
    root = address(job.node.endpoint)
    if state in AT_THE_PROXY:
        cut = sum(sever(os.getpid(), address(engine.endpoint)) for engine in job.engines(LEAVES))
        cut += sum(sever(job.pid(name), root) for name in SOURCES)
    else:
        cut = sever(job.pid(CELL), root)
    assert cut > 0


def cut_lane(job: FaultJob) -> None:
    """Over which one engine asks the other whether it still holds what was read."""
    assert sum(sever(job.pid(name), str(job.shm)) for name in DESTINATIONS) > 0


def corrupt(job: FaultJob) -> None:
    """Bits of each block, which are what they were when this is done again."""
    for pool in job.shm.glob(f"kv-{LEAVES}-*"):
        np.memmap(pool, np.uint8, "r+")[::256] ^= 1


async def into_a_full_one(job: FaultJob, streams: Streams) -> list[Event]:
    """The one call that there is goes to the last cell; when that leaves, to one whose KV is all pinned."""
    pins: list[tuple[Ref, str]] = []
    for engine in job.engines(TAKES):
        blocks = (await job.status(TAKES)).engine.kv_blocks_total // RANKS
        for number in range(blocks):
            session = f"full-{number}"
            await fill(engine, session, number)
            pins.append((engine, (await engine.ask(ExportKv(session=session, lease_s=30.0))).pin))
    metrics = (await job.status(TAKES)).engine
    assert metrics.kv_blocks_used == metrics.kv_blocks_total

    async def let_go() -> None:
        for engine, pin in pins:
            assert await engine.ask(ReleaseKv(pin=pin))

    before = (await job.status(LEAVES)).engine.generated_tokens
    async with streams.one():
        while (await job.status(LEAVES)).engine.generated_tokens < before + 2:
            """Its call is not there yet."""
        return await job.change(ToTrain, LEAVES, state="migrate", over=let_go)


async def fill(engine: Ref, session: str, seed: int) -> None:
    """One block."""
    draw = random.Random(seed)
    ids = tuple(draw.randrange(300) for _ in range(16))
    sampling = SamplingParams(max_new_tokens=1)
    request = GenerateRequest(
        call=session, session=session, prompt_ids=ids, prompt_tokens=len(ids), sampling=sampling
    )
    async for _ in engine.stream(Generate(request=request)):
        """What it samples is of no use."""


def address(endpoint: str) -> str:
    return endpoint.removeprefix("unix:")


# --- what it comes to -----------------------------------------------------------------------------


def check_outcome(events: list[Event], case: Case) -> None:
    assert named(events, "call_failed") == []
    (end,) = named(events, ("role_change", "role_change_lost"))
    outcome = end.get("outcome", "lost")
    if case.fault == "opposite":
        assert outcome == "turned_back"
    elif case.fault == "busy":
        assert outcome == "failed"
        assert [*end["states_s"]][-5:] == ["end_training", *WAKE, "open_route"]
    elif case.state == "open_route" and case.fault in ("rank", "cell", "link"):
        # It may have answered already.
        assert outcome in ("done", "lost")
    elif case.fault in ("rank", "cell") or (case.fault == "link" and case.state not in AT_THE_PROXY):
        assert outcome == "lost"
    else:
        assert outcome == "done"


def check_counters(events: list[Event], case: Case) -> None:
    """Of each call that left it is known whether it was computed again, and of each session why."""
    for closed in named(events, "route_closed", lost=False):
        of_change = [event for event in events if event.get("change") == closed["change"]]
        moved = named(of_change, "kv_moved")
        with_calls = [event for event in moved if event["call"] is not None]
        assert closed["sessions_moved"] == len(moved)
        assert closed["recomputed"] == closed["calls_moved"] - len(with_calls)
        reasons = Counter(event["reason"] for event in named(of_change, "kv_not_moved"))
        assert {n: c for n, c in closed["recomputed_by"].items() if n != "left_behind"} == reasons
    if case.state not in LEAVING:
        return
    (closed,) = named(events, "route_closed", change=named(events, "role_change_ordered")[0]["change"])
    assert closed["calls_moved"] > 0
    if case.state == "migrate" and case.fault in ("corrupt", "full"):
        assert closed["recomputed"] == closed["calls_moved"]
        assert "import_KvUnavailable" in closed["recomputed_by"]
    if case.state == "migrate" and case.fault == "lane":
        assert any(reason.startswith("import_") for reason in closed["recomputed_by"])


async def check_nothing_is_left(job: FaultJob) -> None:
    """Where no call is in flight, whatever happened before."""
    for cell in job.cells:
        metrics = (await job.status(cell)).engine
        assert (metrics.running, metrics.kv_blocks_used, metrics.kv_blocks_pinned) == (0, 0, 0)
    ranks = [(cell, rank) for cell in job.cells for rank in job.ranks]
    names = [*(f"cell-{cell}" for cell in job.cells), *(f"cell-{cell}-rank-{rank}" for cell, rank in ranks)]
    assert sorted(job.processes()) == sorted(names)
    assert job.regions() == job.regions_at_first
