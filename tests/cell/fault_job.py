"""A core and two satellites as a job runs them, processes all, under the job's own WaterlevelActor, proxy and
queue. What is decided is the test's, and it knows when each state of a role change begins."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import structlog

from gyre.actors import Actor, ChildSpec, Node, ProcessSpec, Ref, Supervisor
from gyre.cell.actor import CellActorConfig
from gyre.cell.engine.base import SamplingParams
from gyre.cell.messages import CellStatus, GetStatus, UpdateWeights
from gyre.cell.role_change import TO_ROLLOUT, TO_TRAIN
from gyre.cell.store import StoreActor, StoreConfig
from gyre.cell.worker_messages import CellSetup
from gyre.proxy import ProxyConfig
from gyre.proxy.actor import ProxyActor, ProxyActorConfig
from gyre.schedule.actor import WaterlevelActorConfig
from gyre.schedule.messages import Connect
from gyre.schedule.policy import PolicyConfig
from gyre.schedule.state import Order, ToRollout, ToTrain
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import AddGroup
from gyre.trajectory.queue import QueueConfig
from gyre.trajectory.queue_actor import MicroStepQueue
from tests.cell.ordered import Decisions, Ordered
from tests.cell.parts import cell_setup, micro_step, trajectory, write_policy
from tests.proxy.scripted import KeepingTrajectory, Kept

# With cuda it takes a GPU for each rank.
DEVICE: Literal["cpu", "cuda"] = "cuda" if os.environ.get("GYRE_TEST_DEVICE") == "cuda" else "cpu"
DTYPE: Literal["float32", "bfloat16"] = "float32" if DEVICE == "cpu" else "bfloat16"
PULL_TIMEOUT_S = 1.5
LONGEST_FROZEN_S = 4.0
CONTEXT_TOKENS = 256
NEW_TOKENS = 50
# Where all faults are played.
RESTS = "GYRE_TEST_FAULTS" in os.environ
AT_THE_PROXY = ("stop_admitting", "pin", "cancel", "migrate", "hand_over", "migrate_idle")
AT_THE_PROXY += ("rest_idle",) if RESTS else ()
LEAVING = (*AT_THE_PROXY, *TO_TRAIN)
RETURNING = (*TO_ROLLOUT, "open_route")

# Synchronous where a state of the proxy begins; what it answers is waited for before one of the cell does.
Action = Callable[[], Awaitable[None] | None]
Event = MutableMapping[str, Any]


class FaultJob:
    """All cells roll out once `start` is over."""

    def __init__(
        self, node: Node, journal: Journal, folder: Path, shm: Path, *, cells: int, ranks: int
    ) -> None:
        # Of a shape whose products are the same bits in every batch.
        model = write_policy(folder / "policy", heads=4, kv_heads=2, width=12, head_dim=16, mlp=64)
        setup = cell_setup(model, shm, folder / "checkpoints", ranks=ranks)
        self.setup = msgspec.structs.replace(
            setup,
            model=msgspec.structs.replace(setup.model, context_tokens=CONTEXT_TOKENS, dtype=DTYPE),
            cluster=msgspec.structs.replace(setup.cluster, device=DEVICE),
            cells=msgspec.structs.replace(setup.cells, cells=cells),
            rollout=msgspec.structs.replace(
                setup.rollout,
                batch_invariant=True,
                kv_tokens=2048,
                max_batch=8,
                kv_rest_bytes=2**24 if RESTS else 0,
            ),
        )
        self.shm = shm
        self.cells, self.ranks = range(cells), range(ranks)
        self.decisions = Decisions()
        self.events: list[Event] = []
        self.kept = Kept()
        self.node = node
        self._journal = journal
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._groups = 0
        self._late: set[asyncio.Future[None]] = set()
        self._begins: tuple[str, Action] | None = None
        self._over: tuple[str, Action] | None = None

    async def start(self) -> None:
        policy = PolicyConfig(groups_per_step=10**6, group_size=1, call_back=0.0)
        config = WaterlevelActorConfig(policy=policy, cells=len(self.cells), steps=10**6)
        self.waterlevel = Ordered(config)
        self.waterlevel.passed = self._passed
        waterlevel = await self._spawn("waterlevel", self.waterlevel)
        queue = MicroStepQueue(QueueConfig(groups_per_step=10**6), self._journal, waterlevel)
        self.queue = await self._spawn("queue", queue)
        trajectory_ref = await self._spawn("trajectory", KeepingTrajectory(self.kept))
        self._proxy = ProxyActor(self._proxy_config(), trajectory_ref)
        self.proxy = await self._spawn("proxy", self._proxy)
        await waterlevel.ask(Connect(proxy=self.proxy, harness=self.proxy, queue=self.queue))
        # In this process: one less that imports torch.
        store = ChildSpec(name="store", start=lambda: StoreActor(StoreConfig()))
        stores = await self._spawn("stores", Supervisor([store]))
        core = await self.node.spawn(self._cell(waterlevel, stores, None, 0))
        satellites = [self._cell(waterlevel, stores, core, cell) for cell in self.cells[1:]]
        await self._spawn("satellites", Supervisor(satellites, max_restarts=10**6))
        await self.all_roll_out()
        self.regions_at_first = self.regions()

    def _cell(self, waterlevel: Ref, stores: Ref, core: Ref | None, cell: int) -> ProcessSpec:
        config = CellActorConfig(
            setup=self.setup,
            cell=cell,
            waterlevel=waterlevel,
            queue=self.queue,
            stores=stores,
            core=core,
            slot=cell,
            pull_timeout_s=PULL_TIMEOUT_S,
        )
        return ProcessSpec(
            name=f"cell-{cell}",
            actor="tests.cell.held:HeldCell",
            config=config,
            log_path=self.setup.log_folder / f"cell-{cell}.log",
            restart="temporary" if core is None else "permanent",
            shutdown_s=20.0,
        )

    def _proxy_config(self) -> ProxyActorConfig:
        setup: CellSetup = self.setup
        return ProxyActorConfig(
            proxy=ProxyConfig(tool_format="plain", wait_s=60.0),
            tokenizer=setup.model_folder,
            sampling=SamplingParams(seed=7, temperature=setup.rollout.temperature, max_new_tokens=NEW_TOKENS),
            window_tokens=CONTEXT_TOKENS,
            model_name="policy",
            kv_rests=RESTS,
        )

    async def _spawn(self, name: str, actor: Actor) -> Ref:
        return await self.node.spawn(ChildSpec(name=name, start=lambda: actor, restart="temporary"))

    # --- role changes -------------------------------------------------------------------------------

    async def all_roll_out(self) -> None:
        """All cells are up and admit calls; one that trains is ordered back."""
        while (cells := str(self.waterlevel.summary()["cells"]).split()) != [
            f"{cell}:rollout" for cell in self.cells
        ]:
            trains = next((cell for cell, phase in enumerate(cells) if phase.endswith(":train")), None)
            if trains is not None and not self.decisions.orders:
                self._order(ToRollout(cell=trains, waterlevel="the test goes on"))
            await self.another_event()

    async def change(
        self,
        to: type[ToTrain] | type[ToRollout],
        cell: int,
        *,
        begins: Action | None = None,
        over: Action | None = None,
        state: str = "",
    ) -> list[Event]:
        """Ordered and over, or lost; all events since the order. `begins` is done as `state` begins, `over`
        before the next one does."""
        first = len(self.events)
        states = LEAVING if to is ToTrain else RETURNING
        if begins is not None:
            at = states.index(state)
            self._begins = (states[at - 1] if at else "", begins)
        if over is not None:
            self._over = (state, over)
        self._order(to(cell=cell, waterlevel="the test wants it"))
        ordered = await self.event("role_change_ordered", first, cell=cell)
        await self.event(("role_change", "role_change_lost"), first, change=ordered["change"])
        await asyncio.gather(*self._late)
        self._late.clear()
        return self.events[first:]

    async def turn_back(self, to: type[ToTrain] | type[ToRollout], cell: int) -> None:
        """The opposite order comes now, and has reached the cell."""
        first = len(self.events)
        self.decisions.opposite = to(cell=cell, waterlevel="the test wants it back")
        self.waterlevel.look()
        await self.event("role_change_unwanted", first)
        self.decisions.opposite = None
        await self.status(cell)

    async def forget_kv(self) -> None:
        """What was said before is known to no engine any more."""
        for cell in self.cells:
            await self.waterlevel._cells[cell].up.ref.ask(UpdateWeights())

    async def add_work(self) -> None:
        """A micro-step that a cell that trains will claim."""
        self._groups += 1
        name = f"g{self._groups:06d}"
        work = micro_step(trajectory(self._groups), group=self._groups)
        await self.queue.ask(AddGroup(group=name, step=0, executions=1, micro_steps=(work,)))

    def _order(self, order: Order) -> None:
        self.decisions.orders.append(order)
        self.waterlevel.look()

    async def _passed(self, state: str) -> None:
        for name in ("_begins", "_over"):
            await (self._done(name, state) or _nothing())

    def _done(self, name: str, state: str) -> Awaitable[None] | None:
        """Does what is due, once."""
        due = getattr(self, name)
        if due is None or due[0] != state:
            return None
        setattr(self, name, None)
        answer: Awaitable[None] | None = due[1]()
        return answer

    # --- events -------------------------------------------------------------------------------------

    def note(self, _: Any, level: str, event: Event) -> Event:
        """The last structlog processor: keeps each event, and acts where the proxy enters a state."""
        self.events.append(event)
        if event["event"] == "role_change_ordered":
            self._at_the_proxy("")
        elif event["event"] == "role_change_state" and event["state"] in AT_THE_PROXY:
            self._at_the_proxy(event["state"])
        self._loop.call_soon_threadsafe(self._more.set)
        raise structlog.DropEvent

    def _at_the_proxy(self, state: str) -> None:
        for name in ("_begins", "_over"):
            if (late := self._done(name, state)) is not None:
                self._late.add(asyncio.ensure_future(late))

    async def another_event(self) -> None:
        self._more.clear()
        async with asyncio.timeout(120.0):
            await self._more.wait()

    async def event(self, names: str | tuple[str, ...], first: int = 0, **fields: Any) -> Event:
        """The first one after `first`, waited for."""
        while not (found := named(self.events[first:], names, **fields)):
            await self.another_event()
        return found[0]

    # --- what there is ----------------------------------------------------------------------------------

    def regions(self) -> set[str]:
        """Beside what each engine that is awake has for its KV, and sockets: weights."""
        return {name for name in os.listdir(self.shm) if not name.startswith((".", "kv-"))}

    def processes(self) -> dict[str, int]:
        """Of this job, by name."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                log = Path(os.readlink(entry / "fd" / "2"))
                if log.parent == self.setup.log_folder:
                    found[log.stem] = int(entry.name)
        return found

    def pid(self, name: str) -> int:
        """Of `cell-1`, or of `cell-1-rank-0`."""
        return self.processes()[name]

    def kill(self, name: str, frozen: tuple[str, ...]) -> None:
        """At once; or, where what is `frozen` keeps the state from its end, in the midst of it."""
        victim = self.pid(name)
        self.in_the_midst(frozen, lambda: os.kill(victim, signal.SIGKILL) is None)

    def in_the_midst(self, frozen: tuple[str, ...], fault: Callable[[], bool]) -> None:
        """While those processes keep the state that begins from its end; at once where it is none. A `fault`
        that has done nothing is tried again."""
        if not frozen:
            fault()
            return
        pids = [self.pid(name) for name in frozen]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until_s = self._loop.time() + LONGEST_FROZEN_S

        def now() -> None:
            if not fault() and self._loop.time() < until_s:
                self._loop.call_later(0.02, now)
                return
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

        self._loop.call_later(0.05, now)

    def calls_at(self, cell: int) -> tuple[str, ...]:
        """In flight there, as the proxy knows."""
        return self._proxy._routes._router.calls_at(cell)

    async def status(self, cell: int) -> CellStatus:
        return await self.waterlevel._cells[cell].up.ref.ask(GetStatus())

    def engines(self, cell: int) -> tuple[Ref, ...]:
        return self.waterlevel._cells[cell].up.engines


async def _nothing() -> None:
    """Nothing is due."""


def named(events: list[Event], names: str | tuple[str, ...], **fields: Any) -> list[Event]:
    wanted = (names,) if isinstance(names, str) else names
    return [e for e in events if e["event"] in wanted and fields.items() <= e.items()]


def http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
