"""A thousand streams, all in flight through fifty role changes: not a token is lost, doubled or changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from gyre.actors import Actor, ChildSpec, Node, Ref, handles
from gyre.cell.engine.base import Chunk, GenerateRequest, SamplingParams
from gyre.cell.messages import Abort, Generate
from gyre.proxy import ExecutionAccess, GetProxyTotals, OpenExecution, ProxyConfig
from gyre.proxy.actor import ProxyActor, ProxyActorConfig
from gyre.schedule.messages import CloseRoute, OpenRoute
from tests.proxy.scripted import KeepingTrajectory, Kept, Script

STREAMS = 1000
EXECUTIONS = 50
CELLS = 20
CHANGES = 50


class Pace:
    """Lets all calls sample up to `released` tokens."""

    def __init__(self) -> None:
        self.released = 1
        self.calls: dict[str, asyncio.Event] = {}
        self.all_began = asyncio.Event()

    def begin(self, call: str) -> asyncio.Event:
        """Set where the call may have more, or is aborted."""
        self.calls[call] = asyncio.Event()
        if len(self.calls) == STREAMS:
            self.all_began.set()
        return self.calls[call]

    def release(self, tokens: int) -> None:
        self.released += tokens
        for go in self.calls.values():
            go.set()


class PacedEngine(Actor):
    """Samples what the script says, no faster than the pace."""

    def __init__(self, script: Script, pace: Pace) -> None:
        self._script = script
        self._pace = pace
        self._aborted: set[str] = set()

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        request = message.request
        ids = self._script.ids(request)
        start = len(request.prompt_ids) - request.prompt_tokens
        assert list(request.prompt_ids[request.prompt_tokens :]) == ids[:start]
        go = self._pace.begin(request.call)
        for position in range(start, len(ids)):
            while position >= self._pace.released and request.call not in self._aborted:
                go.clear()
                await go.wait()
            if request.call in self._aborted:
                self._aborted.remove(request.call)
                yield Chunk(token_ids=(), logprobs=(), versions=(), finish_reason="abort")
                return
            last = position == len(ids) - 1
            yield Chunk(
                token_ids=(ids[position],),
                logprobs=(-position - 0.5,),
                versions=(0,),
                finish_reason="stop" if last else None,
            )

    @handles(Abort)
    async def abort(self, message: Abort) -> None:
        self._aborted.add(message.call)
        self._pace.calls[message.call].set()


class Streams:
    """A proxy, its cells, and clients that read streams."""

    def __init__(self, folder: Path, node: Node, http: aiohttp.ClientSession) -> None:
        self.kept = Kept()
        self.script = Script(folder, _answer)
        self.pace = Pace()
        self._folder = folder
        self._node = node
        self._http = http
        self._engines: list[Ref] = []

    async def start(self) -> None:
        config = ProxyActorConfig(
            proxy=ProxyConfig(tool_format="plain"),
            tokenizer=self._folder,
            sampling=SamplingParams(seed=7, max_new_tokens=512),
            window_tokens=1024,
            model_name="policy",
        )
        kept = await self._node.spawn(
            ChildSpec(name="trajectory", start=lambda: KeepingTrajectory(self.kept))
        )
        self.proxy = await self._node.spawn(ChildSpec(name="proxy", start=lambda: ProxyActor(config, kept)))
        for cell in range(CELLS):
            spec = ChildSpec(name=f"engine-{cell}", start=lambda: PacedEngine(self.script, self.pace))
            self._engines.append(await self._node.spawn(spec))
            await self.open(cell)

    async def open(self, cell: int) -> None:
        route = OpenRoute(
            cell=cell,
            incarnation=1,
            engines=(self._engines[cell],),
            version=0,
            capacity_calls=2 * STREAMS // CELLS,
            window_tokens=1024,
        )
        await self.proxy.ask(route)

    async def read(self, access: ExecutionAccess, number: int) -> str:
        """The text of one stream."""
        body = {"messages": [{"role": "user", "content": f"question {number}"}], "stream": True}
        url, headers = f"{access.base_url}/chat/completions", {"Authorization": f"Bearer {access.key}"}
        async with self._http.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            lines = (await response.text()).splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)


def _answer(prompt: str) -> str:
    number = prompt.partition("question ")[2].partition("<")[0]
    return f"the answer to question {number} is long enough for all of it, {number}<|im_end|>"


@pytest.fixture
async def streams(chatml_folder: Path) -> AsyncIterator[Streams]:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(Node(name="test"))
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        made = Streams(chatml_folder, node, http)
        await made.start()
        yield made


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_thousand_streams_over_fifty_role_changes(streams: Streams) -> None:
    opened = [OpenExecution(execution=f"g000000.{n:02d}", attempt=0) for n in range(EXECUTIONS)]
    accesses = [await streams.proxy.ask(execution) for execution in opened]
    async with asyncio.TaskGroup() as tasks:
        readers = [
            tasks.create_task(streams.read(accesses[number % EXECUTIONS], number))
            for number in range(STREAMS)
        ]
        await streams.pace.all_began.wait()
        moved = 0
        for change in range(CHANGES):
            cell = change % CELLS
            moved += (await streams.proxy.ask(CloseRoute(cell=cell))).calls
            await streams.open(cell)
            streams.pace.release(change % 2)
        assert not any(reader.done() for reader in readers)
        streams.pace.release(1000)
    assert moved > CHANGES * STREAMS // CELLS // 2

    texts = {reader.result() for reader in readers}
    assert len(texts) == STREAMS
    assert len(streams.kept.records) == STREAMS
    for record in streams.kept.records:
        request = GenerateRequest(
            call=record.call,
            session=record.execution,
            prompt_ids=record.new_input_ids,
            prompt_tokens=len(record.new_input_ids),
            sampling=SamplingParams(),
        )
        assert list(record.output_ids) == streams.script.ids(request)
        assert list(record.logprobs) == [-position - 0.5 for position in range(len(record.output_ids))]
        assert record.output_message["content"] in texts
    totals = await streams.proxy.ask(GetProxyTotals())
    assert (totals.failed_calls, totals.calls, totals.reroutes) == (0, STREAMS, moved)
