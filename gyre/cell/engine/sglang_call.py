"""One call to a SGLang server: pieces come in, chunks go out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator

import msgspec

from gyre.cell.engine.base import Chunk, FinishReason, GenerateRequest
from gyre.cell.engine.sampled import SampledLeg
from gyre.cell.engine.sglang_wire import Piece, Reading

_TELLING_TOKENS = 32


class Call:
    """A call from its request to its last chunk. `rid` is its name at the server, used once. While it is
    `held` it tells nothing but its end. One that is `recalled` is `back`, and may be sent again, when the
    server has aborted it."""

    def __init__(self, request: GenerateRequest, stop_ids: frozenset[int], chunk_interval_s: float) -> None:
        self.request = request
        self.rid = ""
        self.reading = Reading(request.call)
        self.ended = asyncio.Event()
        self.settled = asyncio.Event()  # it is back, or has ended
        self.back = False
        self.sent = False
        self.recalled = False
        self.stopped_early = False
        self.over_at_server = False
        self._stop_ids = stop_ids
        self._interval_s = chunk_interval_s
        # The first token leaves at once: somebody waits for it.
        self._told_at_s = -math.inf
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._held = False
        self._error: BaseException | None = None
        self._sampled: list[int] = []
        # When the first tokens came and how many, and when the last.
        self._first: tuple[float, int] | None = None
        self._last_at_s = 0.0

    @property
    def running(self) -> bool:
        return bool(self._sampled)

    @property
    def tokens_per_s(self) -> float | None:
        """Of what came after the first; None of a call too short to tell."""
        if self._first is None or len(self._sampled) < _TELLING_TOKENS:
            return None
        at_s, count = self._first
        took_s = self._last_at_s - at_s
        return (len(self._sampled) - count) / took_s if took_s > 0 else None

    @property
    def leg(self) -> SampledLeg:
        """What was sampled of it here."""
        request = self.request
        return SampledLeg(call=request.call, stay=request.stay, tokens=len(self._sampled))

    @property
    def so_far(self) -> GenerateRequest:
        """The request with what was sampled."""
        ids = (*self.request.prompt_ids, *self._sampled)
        return msgspec.structs.replace(self.request, prompt_ids=ids)

    def send(self, rid: str) -> None:
        """It is at the server from now on, under that name."""
        before, self.reading = self.reading, Reading(self.request.call)
        self.reading.cached_tokens = before.cached_tokens
        self.reading.retractions = before.retractions + (self.rid != "")
        self.rid, self.sent, self.recalled = rid, True, False
        self.back = False
        self.settled.clear()

    def feed(self, data: bytes) -> int:
        """An event of the server. Answers how many tokens are new; raises what Reading does."""
        if self.ended.is_set():
            return 0
        piece = self._until_stop(self.reading.take(data))
        self._sampled.extend(piece.token_ids)
        if piece.token_ids:
            self._last_at_s = time.monotonic()
            self._first = self._first or (self._last_at_s, len(piece.token_ids))
        if piece.finish_reason == "abort" and self.recalled:
            self.sent, self.back = False, True
            self.settled.set()
            piece = msgspec.structs.replace(piece, finish_reason=None)
        if piece.token_ids or piece.finish_reason is not None:
            self._pieces.extend([piece] if self._interval_s > 0 else _singly(piece))
        if piece.finish_reason is not None:
            self.over_at_server = not self.stopped_early
            self._end()
        if not self._held or self.ended.is_set():
            self._news.set()
        return len(piece.token_ids)

    def finish(self, reason: FinishReason) -> None:
        """Ends it with what it has."""
        if not self.ended.is_set():
            self._pieces.append(Piece(finish_reason=reason))
            self._end()
            self._news.set()

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, after what it has."""
        if not self.ended.is_set():
            self._error = error
            self._end()
            self._news.set()

    def hold(self, held: bool) -> None:
        self._held = held
        if not held and self._pieces:
            self._news.set()

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Until the one with a finish reason."""
        while True:
            await self._news.wait()
            await self._interval()
            if self._held and not self.ended.is_set():
                self._news.clear()
                continue
            if not self._pieces and self._error is not None:
                raise self._error
            chunk = self._take()
            if not self._pieces and self._error is None:
                self._news.clear()
            if chunk is not None:
                yield chunk
                if chunk.finish_reason is not None:
                    return

    def _end(self) -> None:
        self.ended.set()
        self.settled.set()

    async def _interval(self) -> None:
        """A chunk a chunk interval, the last one at once."""
        rest_s = self._told_at_s + self._interval_s - time.monotonic()
        if rest_s > 0 and not self.ended.is_set():
            try:
                async with asyncio.timeout(rest_s):
                    await self.ended.wait()
            except TimeoutError:
                return

    def _take(self) -> Chunk | None:
        if not self._pieces:
            return None
        # As often as asked: each as it came where that is as often as can be.
        count = len(self._pieces) if self._interval_s > 0 else 1
        taken, self._pieces = self._pieces[:count], self._pieces[count:]
        if len(self._pieces) == 1 and not self._pieces[0].token_ids:
            taken.append(self._pieces.pop())
        self._told_at_s = time.monotonic()
        last = taken[-1]
        return Chunk(
            token_ids=tuple(token for piece in taken for token in piece.token_ids),
            logprobs=tuple(logprob for piece in taken for logprob in piece.logprobs),
            versions=tuple(version for piece in taken for version in piece.versions),
            finish_reason=last.finish_reason,
            cached_tokens=self.reading.cached_tokens or 0,
            routed_experts=last.routed_experts if last.finish_reason is not None else None,
        )

    def _until_stop(self, piece: Piece) -> Piece:
        """SGLang knows no stop tokens where it is to ignore the model's end tokens."""
        for at, token in enumerate(piece.token_ids):
            if token in self._stop_ids:
                self.stopped_early = piece.finish_reason is None
                return msgspec.structs.replace(
                    piece,
                    token_ids=piece.token_ids[: at + 1],
                    logprobs=piece.logprobs[: at + 1],
                    versions=piece.versions[: at + 1],
                    finish_reason="stop",
                    routed_experts=None,
                )
        return piece


def _singly(piece: Piece) -> list[Piece]:
    """Token by token: a server puts those together that it is late with."""
    rows = list(zip(piece.token_ids, piece.logprobs, piece.versions, strict=True))
    singles = [Piece(token_ids=(t,), logprobs=(p,), versions=(v,)) for t, p, v in rows[:-1]]
    return [
        *singles,
        Piece(
            token_ids=piece.token_ids[-1:],
            logprobs=piece.logprobs[-1:],
            versions=piece.versions[-1:],
            finish_reason=piece.finish_reason,
            routed_experts=piece.routed_experts,
        ),
    ]
