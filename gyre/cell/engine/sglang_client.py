"""HTTP to one SGLang server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp

from gyre.cell.engine.base import EngineFault
from gyre.cell.engine.sglang_wire import Answer, Events, decode

COMMAND_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0


class SglangClient:
    """One session, of the event loop that it is first used in. All methods raise EngineFault where the
    server does not answer or answers with an error."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> bytes:
        return await self._ask("GET", path, None, timeout_s)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> bytes:
        return await self._ask("POST", path, body or {}, timeout_s)

    async def command(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        """For those that say `success`."""
        answer = decode(await self.post(path, body, timeout_s=timeout_s), Answer, f"answer to {path}")
        if not answer.success:
            raise EngineFault(f"SGLang refused {path}: {answer.message}")

    async def has(self, path: str) -> bool:
        """Whether there is such a route, which is for POST alone."""
        async with self._request("GET", path, None, COMMAND_TIMEOUT_S) as response:
            return response.status != 404

    async def generate(self, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """The data of each event. Closing it closes the connection, and the server ends the call."""
        events = Events()
        try:
            async with self._request("POST", "/generate", body, None) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    kind = ValueError if response.status == 400 else EngineFault
                    raise kind(f"SGLang answered /generate with {response.status}: {text[:500]}")
                async for data in response.content.iter_any():
                    for event in events.feed(data):
                        yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFault(f"the connection to SGLang at {self.url} broke: {error!r}") from error
        if not events.done:
            raise EngineFault(f"SGLang at {self.url} ended a stream without [DONE]")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, path: str, body: Any, timeout_s: float) -> bytes:
        try:
            async with self._request(method, path, body, timeout_s) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFault(f"SGLang at {self.url} does not answer {path}: {error!r}") from error
        if response.status != 200:
            text = data[:500].decode(errors="replace").strip()
            raise EngineFault(f"SGLang answered {path} with {response.status}: {text}")
        return data

    def _request(
        self, method: str, path: str, body: Any, timeout_s: float | None
    ) -> aiohttp.client._RequestContextManager:
        if self._session is None:
            # A server closes a connection that idles, perhaps just when the next call is sent on it.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_TIMEOUT_S)
        return self._session.request(method, self.url + path, json=body, timeout=timeout)
