"""The proxy's HTTP side: keys, bodies, whole and streamed answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import structlog
from aiohttp import web

from gyre.proxy.answers import StreamedAnswer, WholeAnswer
from gyre.proxy.api import Api, Speech, TokenCounter, key_of
from gyre.proxy.calls import CallDesk
from gyre.proxy.config import ProxyConfig
from gyre.proxy.conversation import CallError, CallRequest, bad_request, internal
from gyre.proxy.executions import Execution
from gyre.proxy.models import listed_model, listed_models, speaks_anthropic
from gyre.proxy.sockets import BACKLOG, ListeningSockets
from gyre.proxy.telling import Telling

log = structlog.get_logger()

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ProxyServer:
    """Serves `apis` and `counters` from `desk`. An error at a
    path of none is in the shape of `messages` where an Anthropic client asks, else of the first API."""

    def __init__(
        self,
        config: ProxyConfig,
        desk: CallDesk,
        apis: Sequence[Api],
        counters: Sequence[TokenCounter],
        messages: Speech,
        model_name: str,
    ) -> None:
        self._config = config
        self._desk = desk
        self._model_name = model_name
        self._default_speech: Speech = apis[0]
        self._messages = messages
        self._api_of_path = {api.path: api for api in apis}
        self._counter_of_path = {counter.path: counter for counter in counters}
        self._speech_of_path: dict[str, Speech] = {**self._api_of_path, **self._counter_of_path}
        app = web.Application(middlewares=[self._errors_as_json], client_max_size=config.max_body_bytes)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._models)
        for api in apis:
            app.router.add_post(api.path, self._call)
        for counter in counters:
            app.router.add_post(counter.path, self._count)
        # A handler is cancelled when its client hangs up: that is how it is noticed.
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, handler_cancellation=True, shutdown_timeout=1.0
        )

    async def start(self, sockets: ListeningSockets) -> None:
        """Takes calls at them."""
        await self._runner.setup()
        await web.SockSite(self._runner, sockets.tcp, backlog=BACKLOG).start()
        if sockets.unix is not None:
            await _UnixSite(self._runner, sockets.unix).start()

    async def stop(self) -> None:
        """Takes no more, then closes the connections."""
        await self._runner.cleanup()

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except CallError as error:
            return self._error(request, error)
        except web.HTTPRequestEntityTooLarge:
            limit = self._config.max_body_bytes
            message = f"the body is larger than {limit} bytes (harness.proxy.max_body_bytes)"
            return self._error(request, CallError(413, message, code="request_too_large"))
        except web.HTTPException as error:
            return self._error(request, CallError(error.status, f"{request.path}: {error.reason}"))
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("request_failed", path=request.path)
            return self._error(request, internal(error))

    def _error(self, request: web.Request, error: CallError) -> web.Response:
        self._desk.answered_with_error(error)
        fallback = self._messages if speaks_anthropic(request.headers) else self._default_speech
        speech = self._speech_of_path.get(request.path, fallback)
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return web.Response(
            status=error.status, body=speech.error(error), content_type="application/json", headers=headers
        )

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._desk.identify(key_of(request.headers))
        # A policy answers to any name; the list has the one that it has.
        name = request.match_info.get("model")
        if name is not None:
            return web.json_response(listed_model(request.headers, name))
        return web.json_response(listed_models(request.headers, [self._model_name]))

    async def _count(self, request: web.Request) -> web.Response:
        counter = self._counter_of_path[request.path]
        execution, asked = await self._asked(request, counter)
        tokens = await self._desk.count_tokens(execution, asked)
        return web.Response(body=counter.count(tokens), content_type="application/json")

    async def _asked(self, request: web.Request, speech: Speech) -> tuple[Execution, CallRequest]:
        """Who asks, and what. Raises CallError."""
        key = key_of(request.headers)
        self._desk.identify(key)
        body = await _read(request)
        # Again: the execution may have ended while its body trickled in.
        return self._desk.identify(key), speech.parse(body, request.headers)

    async def _call(self, request: web.Request) -> web.StreamResponse:
        api = self._api_of_path[request.path]
        execution, asked = await self._asked(request, api)
        flight = await self._desk.admit(execution, asked)
        answer = self._answer(request, api, asked)
        try:
            response = await answer.send(flight)
        except CallError as error:
            if not answer.begun:
                raise
            self._desk.answered_with_error(error)
            return await answer.end_with(error)
        except (asyncio.CancelledError, ConnectionError):
            execution.hung_up(flight)
            raise
        except Exception as error:
            execution.hung_up(flight)
            if not answer.begun:
                raise
            # Its status has left: a second head would be no HTTP.
            log.exception("request_failed", path=request.path, call=flight.call)
            failure = internal(error)
            self._desk.answered_with_error(failure)
            return await answer.end_with(failure)
        await self._desk.delivered(execution, flight)
        return response

    def _answer(self, request: web.Request, api: Api, asked: CallRequest) -> WholeAnswer | StreamedAnswer:
        if not asked.stream:
            return WholeAnswer(request, api, asked)
        telling = Telling(api.stream(asked), self._desk.live(asked))
        return StreamedAnswer(request, telling, api.keep_alive, self._config.keep_alive_s)


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise bad_request(f"the body cannot be read: {error}") from error


class _UnixSite(web.BaseSite):
    """At a unix socket that listens already: aiohttp has one for paths only."""

    def __init__(self, runner: web.AppRunner, listening: socket.socket) -> None:
        super().__init__(runner, backlog=BACKLOG)
        self._listening = listening

    @property
    def name(self) -> str:
        return f"http://unix:{self._listening.getsockname()}:"

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(server, sock=self._listening, backlog=BACKLOG)
