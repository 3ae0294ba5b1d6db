"""Answers to calls as they leave: whole, or as server-sent events."""

from __future__ import annotations

from aiohttp import web

from gyre.proxy.api import Api
from gyre.proxy.conversation import CallError, CallRequest, Completion


class WholeAnswer:
    """One JSON body. It is written before the handler returns, so that what does not arrive is noticed."""

    begun = False

    def __init__(self, request: web.Request, api: Api) -> None:
        self._request = request
        self._api = api

    async def keep_alive(self) -> None:
        """Such a client just waits."""

    async def send(self, asked: CallRequest, completion: Completion) -> web.StreamResponse:
        response = web.Response(body=self._api.answer(asked, completion), content_type="application/json")
        _check_connected(self._request)
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def end_with(self, error: CallError) -> web.StreamResponse:
        raise error


class StreamedAnswer:
    """Server-sent events. The status line leaves with the first event, so that a call which fails soon
    still gets a status that harnesses understand."""

    def __init__(self, request: web.Request, api: Api) -> None:
        self._request = request
        self._api = api
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    @property
    def begun(self) -> bool:
        return self._response.prepared

    async def keep_alive(self) -> None:
        await self._write(self._api.keep_alive)

    async def send(self, asked: CallRequest, completion: Completion) -> web.StreamResponse:
        for event in self._api.events(asked, completion):
            await self._write(event)
        await self._response.write_eof()
        return self._response

    async def end_with(self, error: CallError) -> web.StreamResponse:
        await self._write(self._api.error_event(error))
        await self._response.write_eof()
        return self._response

    async def _write(self, event: bytes) -> None:
        _check_connected(self._request)
        if not self.begun:
            await self._response.prepare(self._request)
        await self._response.write(event)


def _check_connected(request: web.Request) -> None:
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client hung up")
