"""The ProxyActor: HTTP in, calls to cells, records to the TrajectoryActor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import structlog

from gyre.actors import Actor, Ref, handles
from gyre.cell.engine.base import SamplingParams
from gyre.proxy.api_chat import ChatCompletions
from gyre.proxy.api_messages import CountTokens, Messages
from gyre.proxy.api_responses import InputTokens, Responses
from gyre.proxy.calls import CallDesk
from gyre.proxy.codec import Codec
from gyre.proxy.config import ProxyConfig
from gyre.proxy.messages import (
    CloseExecution,
    ExecutionAccess,
    GetProxyTotals,
    OpenExecution,
    ProxyTotals,
)
from gyre.proxy.routes import Routes
from gyre.proxy.server import ProxyServer
from gyre.proxy.sockets import ListeningSockets
from gyre.schedule.messages import CallsInFlight, CloseRoute, OpenRoute, RouteClosed, WatchCalls

log = structlog.get_logger()


class ProxyActorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling` is the job's: whatever a harness asks for, tokens are drawn so; its seed is the job's and
    its `max_new_tokens` bounds every answer. `window_tokens` bounds prompt and answer together.
    `model_name` is what `/v1/models` lists. `unix_socket` is served beside TCP. `kv_rests`: engines keep KV
    in host memory while their cell trains."""

    proxy: ProxyConfig
    tokenizer: Path
    sampling: SamplingParams
    window_tokens: int
    model_name: str
    unix_socket: Path | None = None
    kv_rests: bool = False


class ProxyActor(Actor):
    """Starts when it listens, at `sockets` where it is given some. Raises CannotListen, ToolFormatUnknown,
    TemplateUnusable."""

    def __init__(
        self, config: ProxyActorConfig, trajectory: Ref, sockets: ListeningSockets | None = None
    ) -> None:
        self._config = config
        self._sockets = sockets
        self._trajectory = trajectory
        self._routes = Routes(config.proxy.wait_s, config.proxy.kv_budget_s, kv_rests=config.kv_rests)
        self.desk: CallDesk
        self._server: ProxyServer | None = None
        self._base_url = ""

    async def started(self) -> None:
        await self.prepare()
        await self.serve()
        log.info("proxy_listening", base_url=self._base_url, unix_socket=str(self._config.unix_socket or ""))

    async def prepare(self) -> None:
        """All but to take calls."""
        config = self._config
        if self._sockets is None:
            self._sockets = await ListeningSockets.open(config.proxy, config.unix_socket)
        self._base_url = self._sockets.base_url
        codec = await asyncio.to_thread(Codec, config.tokenizer, config.proxy.tool_format)
        self.desk = CallDesk(
            codec=codec,
            routes=self._routes,
            trajectory=self._trajectory,
            run=self.context.run,
            sampling=config.sampling,
            window_tokens=config.window_tokens,
            model_name=config.model_name,
            delivered=self.delivered,
        )
        messages = Messages()
        self._server = ProxyServer(
            config.proxy,
            self.desk,
            [ChatCompletions(), Responses(), messages],
            [CountTokens(), InputTokens()],
            messages,
            config.model_name,
        )

    async def serve(self) -> None:
        """From now on it takes calls."""
        assert self._server is not None and self._sockets is not None
        await self._server.start(self._sockets)

    async def delivered(self, execution: str, call: str) -> None:
        """The answer has reached the harness."""

    async def stopping(self) -> None:
        if self._server is not None:
            await self._server.stop()
        if self._sockets is not None:
            self._sockets.close()

    def summary(self) -> Mapping[str, Any]:
        if self._server is None:
            return {}
        return {"base_url": self._base_url, **msgspec.structs.asdict(self.desk.totals())}

    @handles(OpenExecution)
    async def open_execution(self, message: OpenExecution) -> ExecutionAccess:
        execution = self.desk.open(message)
        return ExecutionAccess(
            base_url=self._base_url, key=execution.key, unix_socket=self._config.unix_socket
        )

    @handles(CloseExecution, concurrent=True)
    async def close_execution(self, message: CloseExecution) -> None:
        await self.desk.close(message.execution)

    @handles(OpenRoute)
    async def open_route(self, message: OpenRoute) -> None:
        self._routes.open(message)
        log.info(
            "route_opened",
            change=message.change,
            cell=message.cell,
            version=message.version,
            engines=len(message.engines),
        )

    @handles(CloseRoute, concurrent=True)
    async def close_route(self, message: CloseRoute) -> RouteClosed:
        closed = await self._routes.close(message.cell, lost=message.lost, change=message.change)
        log.info(
            "route_closed",
            change=message.change,
            cell=message.cell,
            lost=message.lost,
            calls_moved=closed.calls,
            sessions_moved=closed.sessions_moved,
            recomputed=closed.recomputed,
            kv_nbytes=closed.kv_nbytes,
            recomputed_by=closed.recomputed_by,
            states_s=closed.states_s,
        )
        return closed

    @handles(WatchCalls)
    async def watch_calls(self, message: WatchCalls) -> AsyncIterator[CallsInFlight]:
        async with aclosing(self.desk.in_flight()) as counts:
            async for calls in counts:
                yield CallsInFlight(calls=calls)

    @handles(GetProxyTotals)
    async def totals(self, message: GetProxyTotals) -> ProxyTotals:
        return self.desk.totals()
