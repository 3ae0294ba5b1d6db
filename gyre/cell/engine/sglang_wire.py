"""What a SGLang server says, checked. Whatever does not fit raises EngineFault with what was wrong."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator
from typing import Annotated, TypeVar

import msgspec

from gyre.cell.engine.base import EngineFault, FinishReason

MAX_EVENT_BYTES = 1 << 30
T = TypeVar("T")


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    routed_experts: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: _Error | None = None


class Answer(msgspec.Struct):
    """Of a command to the server."""

    success: bool = True
    message: str = ""


class _MemoryUsage(msgspec.Struct):
    """GiB of one rank."""

    weight: Annotated[float, msgspec.Meta(le=2**20)] = 0.0
    kvcache: Annotated[float, msgspec.Meta(le=2**20)] = 0.0


class _InternalState(msgspec.Struct):
    memory_usage: _MemoryUsage = msgspec.field(default_factory=_MemoryUsage)


class ServerInfo(msgspec.Struct):
    """Of /server_info, what concerns us."""

    version: str
    served_model_name: str = ""
    enable_deterministic_inference: bool = False
    internal_states: list[_InternalState] = []

    @property
    def held_bytes(self) -> int:
        """Of a rank's device, by weights and KV."""
        usage = [state.memory_usage for state in self.internal_states]
        return int(max((one.weight + one.kvcache for one in usage), default=0.0) * 2**30)


class _Load(msgspec.Struct):
    num_used_tokens: int = 0


class _Loads(msgspec.Struct):
    loads: list[_Load] = []


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a call, as the server tells them."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    routed_experts: bytes | None = None


def decode(data: bytes, kind: type[T], what: str) -> T:
    """EngineFault where `data` is not that."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineFault(f"SGLang's {what} is not understood: {error}: {_shown(data)}") from error


def used_tokens(data: bytes) -> int:
    """Of /v1/loads: tokens of KV in use, over all schedulers."""
    return sum(load.num_used_tokens for load in decode(data, _Loads, "/v1/loads").loads)


class Events:
    """Cuts a stream of server-sent events into their data."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that `data` completes. After `[DONE]` there are none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EngineFault(f"SGLang sent an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if self.done or not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                self.done = True
            else:
                yield event


class Reading:
    """One call's events, in order, as pieces."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._versions: list[int] = []
        self.cached_tokens: int | None = None
        self.retractions = 0

    @property
    def tokens(self) -> int:
        """Told so far."""
        return len(self._versions)

    def take(self, data: bytes) -> Piece:
        """Raises EngineFault; ValueError where the server finds the request senseless."""
        event = decode(data, _Event, "answer to /generate")
        if event.error is not None:
            if event.error.code == 400:
                raise ValueError(f"SGLang refused call {self._call}: {event.error.message}")
            raise self._fault(f"the server reports: {event.error.message}")
        if event.meta_info is None:
            raise self._fault(f"meta_info is missing: {_shown(data)}")
        return self._piece(event.output_ids, event.meta_info)

    def _piece(self, output_ids: list[int], meta: _Meta) -> Piece:
        finish = self._finish(meta.finish_reason)
        new = meta.completion_tokens - self.tokens
        # An abort of a waiting call tells its last token once more, behind what was not told yet.
        if not (0 <= new <= len(output_ids) if finish == "abort" else new == len(output_ids)):
            raise self._fault(
                f"{len(output_ids)} tokens came, but completion_tokens went from {self.tokens} to"
                f" {meta.completion_tokens}"
            )
        rows = meta.output_token_logprobs
        rows = rows[max(len(rows) - new, 0) :] if new else []
        ids = [row[1] for row in rows]
        if len(ids) != new or (finish != "abort" and ids != output_ids):
            raise self._fault(f"output_token_logprobs are of {ids}, output_ids are {output_ids}")
        versions = self._new_versions(new, meta)
        if self.cached_tokens is None and new:
            self.cached_tokens = meta.cached_tokens
        self.retractions = max(self.retractions, meta.num_retractions)
        return Piece(
            token_ids=tuple(ids),
            logprobs=tuple(self._logprob(row[0]) for row in rows),
            versions=tuple(versions),
            finish_reason=finish,
            routed_experts=self._experts(meta.routed_experts),
        )

    def _logprob(self, logprob: float | None) -> float:
        if logprob is None or not math.isfinite(logprob) or logprob > 1e-3:
            raise self._fault(f"a log-probability is {logprob}")
        return min(logprob, 0.0)

    def _version(self, text: str | None) -> int:
        if text is None or not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise self._fault(f"weight_version is {text!r}, which Gyre has not given it")
        return int(text)

    def _new_versions(self, new: int, meta: _Meta) -> list[int]:
        """Of the tokens that are new. An answer names one version, that of its last token; the last answer
        has the versions of all tokens."""
        told = len(self._versions)
        if meta.weight_versions is None:
            self._versions += [self._version(meta.weight_version)] * new if new else []
            return self._versions[told:]
        known: list[int] = []
        for span in meta.weight_versions:
            known += [self._version(span.version)] * (min(span.end, told + new) - max(span.start, 0))
        if known[:told] != self._versions or len(known) != told + new:
            raise self._fault(
                f"weight_versions are {known}, told before as {self._versions}, with {new} new ones"
            )
        self._versions = known
        return known[told:]

    def _finish(self, finish: _Finish | None) -> FinishReason | None:
        if finish is None:
            return None
        match finish.type:
            case "stop":
                return "stop"
            case "length":
                return "length"
            case "abort" if finish.status_code is None:
                return "abort"
            case "abort":
                raise self._fault(f"the server ended it: {finish.status_code} {finish.message}")
        raise self._fault(f"finish_reason is {finish.type!r}")

    def _experts(self, text: str | None) -> bytes | None:
        if text is None:
            return None
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self._fault(f"routed_experts are not base64: {error}") from error

    def _fault(self, what: str) -> EngineFault:
        return EngineFault(f"SGLang's answer to call {self._call}: {what}")


def _shown(data: bytes) -> str:
    text = data[:200].decode(errors="replace")
    return repr(text) if len(data) <= 200 else f"{text!r}... ({len(data)} bytes)"
