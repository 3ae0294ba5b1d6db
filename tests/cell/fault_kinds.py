"""Which faults are played in which states of a role change, and how."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any, NamedTuple

import numpy as np

from gyre.actors import Ref
from gyre.cell.engine.base import GenerateRequest, SamplingParams
from gyre.cell.messages import ExportKv, Generate, ReleaseKv
from gyre.schedule.state import ToRollout, ToTrain
from tests.cell.fault_job import AT_THE_PROXY, LEAVING, RETURNING, Action, Event, FaultJob, named
from tests.cell.fault_streams import Streams
from tests.cell.severing import sever

ALL = "GYRE_TEST_FAULTS" in os.environ
CELLS, RANKS = (int(count) for count in os.environ.get("GYRE_TEST_FAULTS", "2x2").split("x"))
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
        "link": lambda: cut_link(job, state),
        "lane": lambda: job.in_the_midst(SOURCES, lambda: cut_lanes(job, state)),
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


def cut_lanes(job: FaultJob, state: str) -> bool:
    """Over which one engine asks the other whether it still holds what was read: as the others cannot answer,
    until it has given up. Answers whether it has. Idle sessions are not even pinned while they cannot."""
    for name in DESTINATIONS:
        sever(job.pid(name), str(job.shm))
    change = named(job.events, "role_change_ordered")[-1]["change"]
    told = named(job.events, "kv_not_moved", change=change)
    return state == "migrate_idle" or any(event["reason"].startswith("import_") for event in told)


def corrupt(job: FaultJob) -> None:
    """Bits of each block, which are what they were when this is done again."""
    for pool in job.shm.glob(f"kv-{LEAVES}-*"):
        np.memmap(pool, np.uint8, "r+")[::256] ^= 1


async def while_it_rests(job: FaultJob, streams: Streams, what: str) -> list[Event]:
    """Idle sessions find no place while the other cell stands still. `what` happens while the cell trains,
    before they call again; all events until they were answered."""
    first = len(job.events)
    pids = [job.pid(name) for name in DESTINATIONS]

    def tell(number: int) -> None:
        for pid in pids:
            os.kill(pid, number)

    async with streams.idle():
        await job.change(
            ToTrain,
            LEAVES,
            state="migrate_idle",
            begins=lambda: tell(signal.SIGSTOP),
            over=lambda: tell(signal.SIGCONT),
        )
        match what:
            case "killed":
                os.kill(job.pid(SOURCES[0]), signal.SIGKILL)
            case "corrupt":
                for file in job.shm.glob(f"kv-{LEAVES}-*-rest-*"):
                    np.memmap(file, np.uint8, "r+")[::256] ^= 1
            case "back":
                await job.change(ToRollout, LEAVES)
    return job.events[first:]


async def into_a_full_one(job: FaultJob, streams: Streams) -> list[Event]:
    """The one call in flight goes to the last cell; when that leaves, to one whose KV is all pinned."""
    pins: list[tuple[Ref, str]] = []
    for engine in job.engines(TAKES):
        blocks = (await job.status(TAKES)).engine.kv_blocks_total // RANKS
        for number in range(blocks):
            session = f"full-{number}"
            await fill(engine, session, number)
            pins.append((engine, (await engine.ask(ExportKv(session=session, lease_s=120.0))).pin))
    metrics = (await job.status(TAKES)).engine
    assert metrics.kv_blocks_used == metrics.kv_blocks_total

    async def let_go() -> None:
        for engine, pin in pins:
            assert await engine.ask(ReleaseKv(pin=pin))

    async with streams.called(callers=1):
        frozen = await caught(job)
        first = len(job.events)
        changing = asyncio.create_task(job.change(ToTrain, LEAVES, state="migrate", over=let_go))
        await job.event("role_change_state", first, state="stop_admitting")
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        return await changing


async def caught(job: FaultJob) -> list[int]:
    """The processes of the cell that leaves, stopped while its call is in the midst of its tokens."""
    pids = [job.pid(name) for name in SOURCES]
    while True:
        calls, before = job.calls_at(LEAVES), (await job.status(LEAVES)).engine.generated_tokens
        while (await job.status(LEAVES)).engine.generated_tokens < before + 2:
            """Nothing is in flight there, or its prompt is being computed."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        # What it has told is heard.
        await asyncio.sleep(0.05)
        if calls and job.calls_at(LEAVES) == calls:
            return pids
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


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
