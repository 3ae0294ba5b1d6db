"""The proxy's HTTP side: keys, bodies, whole and streamed answers."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog
from aiohttp import web

from gyre.proxy.api import Api, key_of
from gyre.proxy.calls import CallDesk
from gyre.proxy.config import ProxyConfig
from gyre.proxy.conversation import CallError, CallRequest, Completion, bad_request

log = structlog.get_logger()

_LONGEST_SOCKET_PATH = 107
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CannotListen(OSError):
    """The proxy's address cannot be had."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"the proxy cannot listen on {address}: {reason}")
        self.address = address


class ProxyServer:
    """Serves `apis` from `desk`, on TCP and where asked on a unix socket too."""

    def __init__(self, config: ProxyConfig, desk: CallDesk, apis: Sequence[Api], model_name: str) -> None:
        self._config = config
        self._desk = desk
        self._model_name = model_name
        self._unix_socket: Path | None = None
        self._default_api = apis[0]
        self._api_of_path = {api.path: api for api in apis}
        app = web.Application(middlewares=[self._errors_as_json], client_max_size=config.max_body_bytes)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/v1/models", self._models)
        for api in apis:
            app.router.add_post(api.path, self._call)
        # A handler is cancelled when its client hangs up: that is how it is noticed.
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, handler_cancellation=True, shutdown_timeout=1.0
        )

    async def start(self, unix_socket: Path | None) -> str:
        """Returns the base URL. Raises CannotListen."""
        await self._runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise CannotListen(f"{host}:{port}", _why_not(error)) from error
        bound_port = self._runner.addresses[0][1]
        if unix_socket is not None:
            await self._listen_on(unix_socket)
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        return f"http://{shown}:{bound_port}/v1"

    async def stop(self) -> None:
        """Closes the ports, then the connections."""
        await self._runner.cleanup()
        if self._unix_socket is not None:
            self._unix_socket.unlink(missing_ok=True)

    async def _listen_on(self, path: Path) -> None:
        if len(str(path).encode()) > _LONGEST_SOCKET_PATH:
            raise CannotListen(str(path), f"a socket's path has at most {_LONGEST_SOCKET_PATH} bytes")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            await web.UnixSite(self._runner, str(path)).start()
        except OSError as error:
            raise CannotListen(str(path), str(error)) from error
        self._unix_socket = path

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
            return self._error(request, CallError(500, f"{type(error).__name__}: {error}", code="internal"))

    def _error(self, request: web.Request, error: CallError) -> web.Response:
        self._desk.answered_with_error(error)
        api = self._api_of_path.get(request.path, self._default_api)
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return web.Response(
            status=error.status, body=api.error(error), content_type="application/json", headers=headers
        )

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._desk.identify(key_of(request.headers))
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "gyre"}
        return web.json_response({"object": "list", "data": [model]})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        api = self._api_of_path[request.path]
        key = key_of(request.headers)
        self._desk.identify(key)
        body = await _read(request)
        # Again: the execution may have ended while its body trickled in.
        execution = self._desk.identify(key)
        asked = api.parse(body, request.headers)
        flight = await self._desk.admit(execution, asked)
        answer = _StreamedAnswer(request, api) if asked.stream else _WholeAnswer(request, api)
        try:
            while not (await asyncio.wait({flight.done}, timeout=self._config.keep_alive_s))[0]:
                await answer.keep_alive()
            response = await answer.send(asked, flight.done.result())
        except CallError as error:
            if not answer.begun:
                raise
            self._desk.answered_with_error(error)
            return await answer.end_with(error)
        except (asyncio.CancelledError, ConnectionError):
            execution.hung_up(flight)
            raise
        await self._desk.delivered(execution, flight)
        return response


class _WholeAnswer:
    """One JSON body. It is written before the handler returns, so that what does not arrive is noticed."""

    begun = False

    def __init__(self, request: web.Request, api: Api) -> None:
        self._request = request
        self._api = api

    async def keep_alive(self) -> None:
        """Such a client just waits."""

    async def send(self, asked: CallRequest, completion: Completion) -> web.StreamResponse:
        response = web.Response(body=self._api.answer(completion), content_type="application/json")
        _check_connected(self._request)
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def end_with(self, error: CallError) -> web.StreamResponse:
        raise error


class _StreamedAnswer:
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


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise bad_request(f"the body cannot be read: {error}") from error


def _check_connected(request: web.Request) -> None:
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client hung up")


def _why_not(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; set harness.proxy.port to another one, or to 0 for a free one"
    return f"{error.strerror or error} (harness.proxy.host, harness.proxy.port)"
