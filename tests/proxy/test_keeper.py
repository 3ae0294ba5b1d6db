"""A proxy that is killed: connections wait, its next life answers with the samples that were recorded."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from gyre.actors import ChildSpec, Node, Ref, handles
from gyre.cell.engine.base import SamplingParams
from gyre.proxy import CloseExecution, ExecutionAccess, GetProxyTotals, OpenExecution, ProxyConfig
from gyre.proxy.actor import ProxyActorConfig
from gyre.proxy.keeper import ProxyKeeper
from gyre.proxy.messages import GetBaseUrl
from gyre.schedule.messages import CloseRoute, OpenRoute
from gyre.trajectory.actor import TrajectoryActor, TrajectoryActorConfig
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.journal import Journal
from gyre.trajectory.messages import GetCalls
from gyre.trajectory.reader import JournalReader
from gyre.trajectory.records import CallRecord, ExecutionOpened, ExecutionSpec, RecordCall
from tests.proxy.scripted import KeepingTrajectory, Kept, Script, ScriptedEngine

USER: dict[str, Any] = {"role": "user", "content": "next: k7.csv"}
EXECUTIONS, TURNS = 50, 3


class RememberingTrajectory(KeepingTrajectory):
    def __init__(self, kept: Kept, recorded: asyncio.Event) -> None:
        super().__init__(kept)
        self._recorded = recorded

    @handles(RecordCall, concurrent=True)
    async def record(self, message: RecordCall) -> None:
        await super().record(message)
        self._recorded.set()

    @handles(GetCalls)
    async def calls(self, message: GetCalls) -> AsyncIterator[CallRecord]:
        for record in self._kept.records:
            yield record


@dataclass
class Stage:
    """A kept proxy, an engine and whom it records to."""

    node: Node
    keeper: Ref
    trajectory: Ref
    script: Script
    http: aiohttp.ClientSession
    logs: list[Any]

    @property
    def pid(self) -> int:
        started = [log for log in self.logs if log["event"] == "process_started"]
        return int(started[-1]["pid"])

    async def open(self, execution: str) -> ExecutionAccess:
        access: ExecutionAccess = await self.keeper.ask(OpenExecution(execution=execution, attempt=0))
        return access

    async def ask(self, access: ExecutionAccess, body: Any) -> dict[str, Any]:
        """Until there is an answer, as harnesses do."""
        url, headers = f"{access.base_url}/chat/completions", {"Authorization": f"Bearer {access.key}"}
        while True:
            try:
                async with self.http.post(url, json=body, headers=headers) as response:
                    answer: dict[str, Any] = await response.json()
                    assert response.status == 200, answer
                    return answer
            except aiohttp.ClientError:
                await asyncio.sleep(0.02)


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


@asynccontextmanager
async def kept(folder: Path, tmp_path: Path, logs: list[Any], trajectory: ChildSpec) -> AsyncIterator[Stage]:
    script = Script(folder, lambda prompt: f"turn {prompt.count('assistant')}<|im_end|>")
    config = ProxyActorConfig(
        proxy=ProxyConfig(),
        tokenizer=folder,
        sampling=SamplingParams(seed=7, max_new_tokens=64),
        window_tokens=1024,
        model_name="m",
        unix_socket=tmp_path / "proxy.sock",
    )
    # No connection outlives the proxy that took it.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with (
        Node(name="test", where=str(tmp_path)) as node,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        records = await node.spawn(trajectory)
        engine = await node.spawn(ChildSpec(name="engine", start=lambda: ScriptedEngine("cell0", 0, script)))
        start = partial(ProxyKeeper, config, records, tmp_path / "proxy.log")
        keeper = await node.spawn(ChildSpec(name="proxy", start=start))
        await keeper.ask(
            OpenRoute(
                cell=0, incarnation=1, engines=(engine,), version=0, capacity_calls=64, window_tokens=1024
            )
        )
        yield Stage(node, keeper, records, script, http, logs)
    assert not (tmp_path / "proxy.sock").exists()


async def test_an_answer_that_was_recorded_and_not_delivered_is_given_again(
    chatml_folder: Path, tmp_path: Path, logs: list[Any]
) -> None:
    held, recorded = Kept(), asyncio.Event()
    start = partial(RememberingTrajectory, held, recorded)
    spec = ChildSpec(name="trajectory", start=start)
    async with kept(chatml_folder, tmp_path, logs, spec) as one:
        access = await one.open("g000000.00")
        assert access.base_url == await one.keeper.ask(GetBaseUrl())
        held.durable.clear()
        body = {"messages": [USER], "stream": False}
        first = asyncio.create_task(one.ask(access, body))
        await held.asked.wait()
        # It is recorded, and its proxy cannot hear of it any more.
        dead = one.pid
        os.kill(dead, signal.SIGSTOP)
        held.durable.set()
        await recorded.wait()
        os.kill(dead, signal.SIGKILL)
        answer = await first
        (record,) = held.records
        assert answer["id"] == f"chatcmpl-{record.call}"
        assert answer["choices"][0]["message"]["content"] == "turn 1"
        assert answer["usage"]["completion_tokens"] == len(record.output_ids)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == record.cached_tokens > 0
        assert len(one.script.requests) == 1
        # And the conversation goes on from it, under a name that no call had.
        message = answer["choices"][0]["message"]
        await one.ask(access, {"messages": [USER, message, USER]})
        assert (held.records[1].parent, held.records[1].call) == (record.call, "g000000.00-0-1000")
        assert held.retried == [record.call] and one.pid != dead
        # Keys live on, and die for good.
        await one.keeper.ask(CloseExecution(execution="g000000.00"))
        os.kill(one.pid, signal.SIGKILL)
        headers = {"Authorization": f"Bearer {access.key}"}
        async with one.http.get(f"{access.base_url}/models", headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "execution_closed")
        # A route that was closed meanwhile is not opened again.
        assert (await one.keeper.ask(CloseRoute(cell=0))).calls == 0
        totals = await one.keeper.ask(GetProxyTotals())
        assert (totals.calls, totals.retries, totals.in_flight) == (1, 1, 0)
        # Its engine is known all the same: it tells what it has sampled.
        os.kill(one.pid, signal.SIGKILL)
        await one.keeper.ask(CloseExecution(execution="g000000.00"))
        assert one.script.ended == ["g000000.00"] * 2
    assert [log["event"] for log in logs].count("proxy_back") == 3


async def test_of_50_executions_no_acknowledged_call_is_missing_and_no_node_is_double(
    chatml_folder: Path, tmp_path: Path, logs: list[Any]
) -> None:
    config = TrajectoryActorConfig(
        sampling=SamplingConfig(), group_size=EXECUTIONS, groups_per_step=1, micro_step_tokens=64
    )
    names = [f"g000000.{index:02d}" for index in range(EXECUTIONS)]
    acknowledged: Counter[str] = Counter()
    counted = asyncio.Condition()

    async def play(one: Stage, name: str, index: int) -> list[str]:
        await one.trajectory.ask(ExecutionOpened(spec=spec(name, index)))
        access = await one.open(name)
        messages, calls = [USER], []
        for turn in range(TURNS):
            answer = await one.ask(access, {"messages": messages})
            calls.append(answer["id"].removeprefix("chatcmpl-"))
            message = answer["choices"][0]["message"]
            assert message["content"] == f"turn {turn + 1}"
            messages = [*messages, message, USER]
            async with counted:
                acknowledged[name] += 1
                counted.notify_all()
        return calls

    async def kill(one: Stage) -> None:
        async with counted:
            await counted.wait_for(lambda: acknowledged.total() >= EXECUTIONS)
        os.kill(one.pid, signal.SIGKILL)

    async with Journal(tmp_path / "journal.db") as journal:
        trajectory = ChildSpec(
            name="trajectory", start=lambda: TrajectoryActor(config, journal, Ref.__new__(Ref))
        )
        async with kept(chatml_folder, tmp_path, logs, trajectory) as one:
            killing = asyncio.create_task(kill(one))
            played = await asyncio.gather(*(play(one, name, i) for i, name in enumerate(names)))
            await killing
    with JournalReader(tmp_path / "journal.db") as reader:
        for name, calls in zip(names, played, strict=True):
            records = reader.calls(name)
            assert [record.call for record in records] == calls
            assert [record.parent for record in records] == [None, *calls[:-1]]
    assert [log["event"] for log in logs].count("proxy_died") == 1


def spec(name: str, index: int) -> ExecutionSpec:
    return ExecutionSpec(
        execution=name,
        group="g000000",
        task="t",
        split="train",
        index=index,
        attempt=0,
        version_dispatched=0,
        group_executions=EXECUTIONS,
        step=0,
    )
