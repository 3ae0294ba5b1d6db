"""An engine that samples at a pace, as an actor and as a server that speaks HTTP: of nothing, so that what is
measured is who stands before it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
from aiohttp import web

from gyre.actors import Actor, Ask, handles
from gyre.cell.engine.base import Chunk
from gyre.cell.messages import Abort, Generate


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: `ids` over and over, `tokens` of them, the first after `first_s`, then one every `token_s`.
    They leave every `chunk_s`, the first at once. Of a call whose limit is lower so many."""

    ids: tuple[int, ...]
    tokens: int
    first_s: float
    token_s: float
    chunk_s: float

    @property
    def seconds(self) -> float:
        """An answer's."""
        return self.first_s + (self.tokens - 1) * self.token_s

    def chunks(self, limit: int) -> Iterator[tuple[float, int, int]]:
        """When, since the start, and which tokens: from, to."""
        tokens = min(self.tokens, limit)
        a_chunk = max(1, round(self.chunk_s / self.token_s)) if self.token_s else tokens
        start = 0
        while start < tokens:
            end = 1 if start == 0 and self.token_s else min(start + a_chunk, tokens)
            yield self.first_s + (end - 1) * self.token_s, start, end
            start = end


class GetFirstTokens(Ask[dict[str, float]], frozen=True, kw_only=True):
    """When each call so far had its first token, on the clock of this machine."""


class PacedEngine(Actor):
    def __init__(self, config: Pace) -> None:
        self._pace = config
        self._first: dict[str, float] = {}

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        request, pace = message.request, self._pace
        began = time.monotonic()
        limit = request.sampling.max_new_tokens
        last = min(pace.tokens, limit)
        for at_s, start, end in pace.chunks(limit):
            if (left_s := began + at_s - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            self._first.setdefault(request.call, time.monotonic())
            count = end - start
            yield Chunk(
                token_ids=tuple(pace.ids[at % len(pace.ids)] for at in range(start, end)),
                logprobs=(-0.5,) * count,
                versions=(0,) * count,
                finish_reason=None if end < last else "length",
            )

    @handles(Abort, concurrent=True)
    async def abort(self, message: Abort) -> None:
        """Nobody leaves here."""

    @handles(GetFirstTokens, concurrent=True)
    async def first_tokens(self, message: GetFirstTokens) -> dict[str, float]:
        first, self._first = self._first, {}
        return first


def http_app(pace: Pace, word: str) -> web.Application:
    """The same answers, each token `word`, as OpenAI-compatible servers of engines stream and send them. The
    first chunk's `created` says when its token was there, in nanoseconds."""

    async def call(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        began = time.monotonic()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        for at_s, start, end in pace.chunks(sys.maxsize):
            if (left_s := began + at_s - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            if not body.get("stream"):
                continue
            if not response.prepared:
                await response.prepare(request)
            await response.write(_event(_chunk(word * (end - start), time.monotonic_ns())))
        if body.get("stream"):
            await response.write(_event(_chunk("", 0, "length")) + b"data: [DONE]\n\n")
            await response.write_eof()
            return response
        message = {"role": "assistant", "content": word * pace.tokens}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": pace.tokens, "total_tokens": pace.tokens + 1}
        whole = {"id": "chatcmpl-x", "object": "chat.completion", "created": 0, "model": "m"}
        return web.json_response(whole | {"choices": [choice], "usage": usage})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    app = web.Application(client_max_size=2**27)
    app.router.add_post("/v1/chat/completions", call)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", health)
    return app


def _chunk(text: str, created: int, reason: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}
    kind = "chat.completion.chunk"
    return {"id": "chatcmpl-x", "object": kind, "created": created, "model": "m", "choices": [choice]}


def _event(fields: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


async def _serve() -> None:
    """A companion: its Pace and word are its arguments, its port its first line."""
    pace = msgspec.json.decode(sys.argv[1], type=Pace)
    runner = web.AppRunner(http_app(pace, sys.argv[2]), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(msgspec.json.encode({"port": runner.addresses[0][1]}).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve())
