"""The rooms beside the HarnessActor, and a job that has nothing else."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gyre.actors import Actor, ChildSpec, Node, Ref, handles
from gyre.harness.actor import HarnessActor, HarnessActorConfig
from gyre.proxy.messages import CloseExecution, ExecutionAccess, GetBaseUrl, OpenExecution
from gyre.schedule.messages import Dispatch, ExecutionFinished, ExecutionsDispatched, ExecutionStarted
from gyre.trajectory.messages import AddGroup, GetResume, ResumeState
from gyre.trajectory.records import ExecutionEnded, ExecutionOpened, ExecutionResult

EMPTY = ResumeState(finished=(), incomplete=(), next_group=0, next_eval=0)


class Neighbours(Actor):
    """Proxy, trajectory, micro-step queue and waterlevel in one: notes what it is told."""

    def __init__(self, resume: ResumeState) -> None:
        self.resume = resume
        self.base_url = "http://127.0.0.1:9/v1"
        self.unix_socket: Path | None = None
        self.said: list[Any] = []
        self.changed = asyncio.Event()

    def note(self, message: Any) -> None:
        self.said.append(message)
        self.changed.set()

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.said if type(message) is kind]

    async def until(self, kind: type, count: int) -> list[Any]:
        async with asyncio.timeout(40):
            while len(found := self.of(kind)) < count:
                self.changed.clear()
                await self.changed.wait()
        return found

    @handles(OpenExecution)
    async def open(self, message: OpenExecution) -> ExecutionAccess:
        self.note(message)
        key = f"key-{message.execution}-{message.attempt}"
        return ExecutionAccess(base_url=self.base_url, key=key, unix_socket=self.unix_socket)

    @handles(GetBaseUrl)
    async def where(self, message: GetBaseUrl) -> str:
        return self.base_url

    @handles(CloseExecution)
    async def close(self, message: CloseExecution) -> None:
        self.note(message)

    @handles(GetResume)
    async def get_resume(self, _: GetResume) -> ResumeState:
        return self.resume

    @handles(ExecutionOpened)
    async def opened(self, message: ExecutionOpened) -> None:
        self.note(message)

    @handles(ExecutionEnded)
    async def ended(self, message: ExecutionEnded) -> None:
        self.note(message)

    @handles(AddGroup)
    async def add_group(self, message: AddGroup) -> None:
        self.note(message)

    @handles(ExecutionsDispatched)
    async def dispatched(self, message: ExecutionsDispatched) -> None:
        self.note(message)

    @handles(ExecutionStarted)
    async def execution_started(self, message: ExecutionStarted) -> None:
        self.note(message)

    @handles(ExecutionFinished)
    async def execution_finished(self, message: ExecutionFinished) -> None:
        self.note(message)


class Job:
    def __init__(self, ref: Ref, neighbours: Neighbours, run_dir: Path) -> None:
        self.ref = ref
        self.neighbours = neighbours
        self.run_dir = run_dir

    async def dispatch(self, groups: int = 1, split: Any = "train") -> None:
        await self.ref.tell(Dispatch(split=split, groups=groups, version=0, step=0))

    async def results(self, count: int) -> list[ExecutionResult]:
        await self.neighbours.until(ExecutionFinished, count)
        ended = self.neighbours.of(ExecutionEnded)
        return sorted((message.result for message in ended), key=lambda result: result.execution)

    def file(self, execution: str, name: str) -> Path:
        return self.run_dir / "executions" / execution / name


StartJob = Callable[..., AbstractAsyncContextManager[Job]]


@asynccontextmanager
async def running(config: HarnessActorConfig, resume: ResumeState = EMPTY) -> AsyncIterator[Job]:
    async with Node(name="test") as node:
        neighbours = Neighbours(resume)
        beside = await node.spawn(ChildSpec(name="beside", start=lambda: neighbours))
        start = partial(HarnessActor, config, beside, beside, beside)
        ref = await node.spawn(ChildSpec(name="harness", start=start, restart="temporary", shutdown_s=30))
        yield Job(ref, neighbours, config.run_dir)
