"""A proxy with scripted engines and a keeping trajectory, all real actors on one node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai

from gyre.actors import ChildSpec, Node, Ref
from gyre.cell.engine.base import SamplingParams
from gyre.proxy import ExecutionAccess, GetProxyTotals, OpenExecution, ProxyConfig, ProxyTotals
from gyre.proxy.actor import ProxyActor, ProxyActorConfig
from gyre.schedule.messages import CloseRoute, OpenRoute
from tests.proxy.scripted import KeepingTrajectory, Kept, Script, ScriptedEngine

USER: Any = {"role": "user", "content": "next: k7.csv"}
PUT: Any = {"type": "function", "function": {"name": "put", "parameters": {"type": "object"}}}
PUT_DATA = '<tool_call>{"name": "put", "arguments": {"folder": "data"}}</tool_call><|im_end|>'


@dataclass
class House:
    node: Node
    proxy: Ref
    script: Script
    kept: Kept
    http: aiohttp.ClientSession
    unix_socket: Path
    engines: dict[int, Ref] = field(default_factory=dict)
    access: dict[str, ExecutionAccess] = field(default_factory=dict)

    async def open_cell(
        self, cell: int, *, incarnation: int = 1, version: int = 0, capacity: int = 8
    ) -> None:
        """Opens the route to a cell's engine, which is made the first time."""
        if cell not in self.engines:
            start = lambda: ScriptedEngine(f"cell{cell}", version, self.script)  # noqa: E731
            spec = ChildSpec(name=f"engine-{cell}-{incarnation}", start=start, restart="temporary")
            self.engines[cell] = await self.node.spawn(spec)
        await self.proxy.ask(
            OpenRoute(
                cell=cell,
                incarnation=incarnation,
                engines=(self.engines[cell],),
                version=version,
                capacity_calls=capacity,
                window_tokens=4096,
            )
        )

    async def close_cell(self, cell: int, *, lost: bool = False) -> int:
        """Answers how many calls were handed over."""
        return (await self.proxy.ask(CloseRoute(cell=cell, lost=lost))).calls

    async def open(self, execution: str = "g000001.00", attempt: int = 0, refill: int = 0) -> ExecutionAccess:
        opening = OpenExecution(execution=execution, attempt=attempt, refill=refill)
        self.access[execution] = await self.proxy.ask(opening)
        return self.access[execution]

    async def post(
        self, body: Any, execution: str = "g000001.00", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """A call; answers the status and the JSON, or the text of a stream."""
        access = self.access[execution]
        sent = {"Authorization": f"Bearer {access.key}", "Content-Type": "application/json"} | (headers or {})
        carry = {"data": body} if isinstance(body, bytes) else {"json": body}
        url = f"{access.base_url}/chat/completions"
        async with self.http.post(url, headers=sent, **carry) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()

    async def chat(self, *messages: Any, execution: str = "g000001.00", **fields: Any) -> dict[str, Any]:
        """A call that must succeed; answers its message."""
        status, answer = await self.post({"messages": messages} | fields, execution)
        assert status == 200, answer
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def hang_up_on(self, body: Any, execution: str = "g000001.00") -> None:
        """A call whose client closes its connection once the engine samples."""
        self.script.pause_at = 1
        call = asyncio.create_task(self.post(body, execution))
        await self.script.paused.wait()
        call.cancel()
        await asyncio.wait([call])

    async def totals(self) -> ProxyTotals:
        return await self.proxy.ask(GetProxyTotals())

    async def until(self, **expected: int) -> ProxyTotals:
        """Totals once they have these values."""
        while True:
            totals = await self.totals()
            if all(getattr(totals, name) == value for name, value in expected.items()):
                return totals
            await asyncio.sleep(0.001)


@asynccontextmanager
async def house(folder: Path, tmp_path: Path, *, cells: int = 1, **settings: Any) -> AsyncIterator[House]:
    """`settings` are of ProxyConfig, SamplingParams and ProxyActorConfig, told apart by name."""
    script = Script(folder, lambda prompt: "hello<|im_end|>")
    kept = Kept()
    names = {*ProxyConfig.__struct_fields__}
    proxy_settings = {name: value for name, value in settings.items() if name in names}
    sampling = SamplingParams(seed=7, max_new_tokens=settings.get("max_new_tokens", 64))
    config = ProxyActorConfig(
        proxy=ProxyConfig(**proxy_settings),
        tokenizer=folder,
        sampling=sampling,
        window_tokens=settings.get("window_tokens", 1024),
        model_name="gyre-policy",
        unix_socket=tmp_path / "proxy.sock",
    )
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(Node(name="test"))
        spec = ChildSpec(name="trajectory", start=lambda: KeepingTrajectory(kept))
        trajectory = await node.spawn(spec)
        proxy = await node.spawn(ChildSpec(name="proxy", start=lambda: ProxyActor(config, trajectory)))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        built = House(node, proxy, script, kept, http, tmp_path / "proxy.sock")
        for cell in range(cells):
            await built.open_cell(cell)
        await built.open()
        yield built


@asynccontextmanager
async def openai_client(access: ExecutionAccess, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    settings = {"base_url": access.base_url, "api_key": access.key, "max_retries": 0} | options
    async with openai.AsyncOpenAI(**settings) as client:
        yield client
