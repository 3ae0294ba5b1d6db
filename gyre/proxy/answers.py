"""Answers to calls as they leave: whole, or as server-sent events."""

from __future__ import annotations

import asyncio

from aiohttp import web

from gyre.proxy.api import Api
from gyre.proxy.conversation import CallError, CallRequest
from gyre.proxy.executions import Flight
from gyre.proxy.telling import Telling


class WholeAnswer:
    """One JSON body. It is written before the handler returns, so that what does not arrive is noticed."""

    begun = False

    def __init__(self, request: web.Request, api: Api, asked: CallRequest) -> None:
        self._request = request
        self._api = api
        self._asked = asked

    async def send(self, flight: Flight) -> web.StreamResponse:
        """Waits for it. Raises CallError, ConnectionError."""
        completion = await flight.complete()
        response = web.Response(
            body=self._api.answer(self._asked, completion), content_type="application/json"
        )
        _check_connected(self._request)
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def end_with(self, error: CallError) -> web.StreamResponse:
        raise error


class StreamedAnswer:
    """Server-sent events, as its tokens come. The status line leaves with the first event, so that a call
    which fails soon still gets a status that harnesses understand; the last event once the call is recorded.
    While it has nothing to say it carries `keep_alive` every `keep_alive_s`: also while tokens come, such as
    those of a tool call."""

    def __init__(
        self, request: web.Request, telling: Telling, keep_alive: bytes, keep_alive_s: float
    ) -> None:
        self._request = request
        self._telling = telling
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._clock = asyncio.get_running_loop().time
        self._due_s = self._clock() + keep_alive_s
        self._response = _unmeasured() if _wants_an_end(request) else web.StreamResponse()
        self._response.headers.update({"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    @property
    def begun(self) -> bool:
        return self._response.prepared

    async def send(self, flight: Flight) -> web.StreamResponse:
        """Raises CallError, where the stream may have `begun`, and ConnectionError."""
        telling = self._telling
        while not flight.done.done():
            await flight.news(telling.tokens, self._due_s - self._clock())
            if len(flight.sample.token_ids) > telling.tokens:
                await self._write(telling.hear(flight.opening, flight.sample.token_ids))
            if self._clock() >= self._due_s and not flight.done.done():
                await self._write(self._keep_alive)
        await self._write(telling.end(flight.done.result()))
        await self._response.write_eof()
        return self._response

    async def end_with(self, error: CallError) -> web.StreamResponse:
        """Raises ConnectionError."""
        await self._write(self._telling.error(error))
        await self._response.write_eof()
        return self._response

    async def _write(self, events: bytes) -> None:
        _check_connected(self._request)
        if not self.begun:
            await self._response.prepare(self._request)
        if events:
            await self._response.write(events)
            self._due_s = self._clock() + self._keep_alive_s


class _Unmeasured(web.StreamResponse):
    """Its body ends where its connection does, whoever ends that."""

    _length_check = False


def _unmeasured() -> web.StreamResponse:
    response = _Unmeasured()
    response.force_close()
    return response


def _wants_an_end(request: web.Request) -> bool:
    """qwen-code asks again where a stream ends too early, and gives up where it breaks off: it must not be
    able to tell the one from the other."""
    return request.headers.get("User-Agent", "").startswith("QwenCode/")


def _check_connected(request: web.Request) -> None:
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client hung up")
