"""Harnesses that call again and again, and know what each answer was before anything happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import aiohttp

from gyre.proxy import CloseExecution, OpenExecution
from tests.cell.fault_job import FaultJob

CALLERS = 4
IDLE = 3
TURNS = 2
# Executions of a caller, one after the other and again: so that none is known where it goes on.
EXECUTIONS = 3


class Streams:
    """`wrong` names the calls whose tokens, numbers or text were others than at first."""

    def __init__(self, job: FaultJob, http: aiohttp.ClientSession) -> None:
        self.answered = 0
        self.wrong: list[tuple[str, int]] = []
        self._job = job
        self._http = http
        self._known: dict[tuple[str, int], Any] = {}
        self._more = asyncio.Event()

    async def learn(self) -> None:
        """What is answered where nothing happens."""
        callers = [_caller(number, turn) for number in range(CALLERS) for turn in range(EXECUTIONS)]
        names = [*callers, *map(_idler, range(IDLE))]
        await asyncio.gather(*(self._play(name, asyncio.Event(), wait=False) for name in names))
        assert len(self._known) == TURNS * len(names)

    @asynccontextmanager
    async def called(self, callers: int = CALLERS) -> AsyncIterator[None]:
        """Within it calls are in flight all the time."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            calling = [tasks.create_task(self._call_on(number, over)) for number in range(callers)]
            try:
                yield
            finally:
                over.set()
                await asyncio.wait(calling)

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Within it sessions wait for their tools; they call again after it."""
        goes_on, first = asyncio.Event(), [asyncio.Event() for _ in range(IDLE)]
        async with asyncio.TaskGroup() as tasks:
            for number, event in enumerate(first):
                tasks.create_task(self._play(_idler(number), goes_on, wait=True, answered=event))
            for event in first:
                await event.wait()
            try:
                yield
            finally:
                goes_on.set()

    async def reach(self, cell: int) -> None:
        """Calls are in flight there."""
        while len(self._job.calls_at(cell)) < 2:
            await self.answers(1)

    async def answers(self, count: int) -> None:
        """So many calls are answered from now on."""
        until = self.answered + count
        while self.answered < until:
            self._more.clear()
            async with asyncio.timeout(60.0):
                await self._more.wait()

    async def _call_on(self, number: int, over: asyncio.Event) -> None:
        for turn in count():
            if over.is_set():
                return
            await self._play(_caller(number, turn % EXECUTIONS), over, wait=False)

    async def _play(
        self, name: str, goes_on: asyncio.Event, *, wait: bool, answered: asyncio.Event | None = None
    ) -> None:
        """One execution: turns, each with all that was said before."""
        access = await self._job.proxy.ask(OpenExecution(execution=name, attempt=0))
        messages = [{"role": "user", "content": f"next: {name}.csv"}]
        for turn in range(TURNS):
            text = await self._call(f"{access.base_url}/chat/completions", access.key, messages)
            record = next(r for r in reversed(self._job.kept.records) if r.execution == name)
            found = (record.output_ids, record.logprobs, text)
            if self._known.setdefault((name, turn), found) != found:
                self.wrong.append((record.call, turn))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "next: box"}]
            self.answered += 1
            self._more.set()
            if answered is not None:
                answered.set()
            if wait:
                await goes_on.wait()
        await self._job.proxy.ask(CloseExecution(execution=name))

    async def _call(self, url: str, key: str, messages: list[dict[str, str]]) -> str:
        """The text of a stream that ends as it should."""
        body = {"messages": messages, "stream": True}
        async with self._http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status == 200, await response.text()
            lines = [line for line in (await response.text()).split("\n") if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        choices = [c for line in lines[:-1] for c in json.loads(line.removeprefix("data: "))["choices"]]
        assert choices[-1]["finish_reason"] in ("stop", "length")
        return "".join(choice["delta"].get("content") or "" for choice in choices)


def _caller(number: int, turn: int) -> str:
    return f"g{turn:06d}.{number:02d}"


def _idler(number: int) -> str:
    return f"g{EXECUTIONS:06d}.{number:02d}"
