"""The messages to the ProxyActor from the rooms above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gyre.actors import Ask, Ref, Tell


class ExecutionAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What a harness gets: `base_url` ends in `/v1`, `key` is its API key. `unix_socket` serves the same
    where a sandbox has no network, None where the proxy listens on TCP only."""

    base_url: str
    key: str
    unix_socket: Path | None


class CompactionLimit(msgspec.Struct, frozen=True, kw_only=True):
    """How often a harness may have its context summarised: who asks once more is refused for good. `words`
    tell such a request: one of them stands in its system prompt or in its last user message."""

    most: int
    words: tuple[str, ...]


class OpenExecution(Ask[ExecutionAccess], frozen=True, kw_only=True):
    """An attempt at an execution begins. An earlier attempt that is still open ends: its key dies. Attempts
    of one `refill` draw alike. Its key is `key`, a new one where that is empty."""

    execution: str
    attempt: int
    refill: int = 0
    compactions: CompactionLimit | None = None
    key: str = ""


class CloseExecution(Ask[None], frozen=True, kw_only=True):
    """The execution's key dies. Calls in flight are cancelled: what was sampled for them is recorded as
    unfinished before the answer."""

    execution: str


class GetBaseUrl(Ask[str], frozen=True, kw_only=True):
    """Where it listens on TCP; ends in `/v1`."""


class ProxyTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the start. `calls` were answered, `failed_calls` are answers with a 5xx status, `reroutes`
    went on at another engine, `retries` were answered with a sample that existed or was in flight. Of
    sessions whose cell left rollout KV was moved, in `kv_move_s` together, or is computed again, where it did
    not rest."""

    calls: int
    failed_calls: int
    reroutes: int
    retries: int
    tool_calls: int
    malformed_tool_calls: int
    in_flight: int
    prompt_tokens: int
    sampled_tokens: int
    kv_sessions_moved: int = 0
    kv_sessions_recomputed: int = 0
    kv_sessions_rested: int = 0
    kv_bytes_moved: int = 0
    kv_move_s: float = 0.0


def added_totals(one: ProxyTotals, other: ProxyTotals) -> ProxyTotals:
    """Of two lives."""
    names = ProxyTotals.__struct_fields__
    return ProxyTotals(**{name: getattr(one, name) + getattr(other, name) for name in names})


class RestoreExecution(Ask[None], frozen=True, kw_only=True):
    """The keeper to a proxy's next life: an execution that is open. Of its calls those `delivered` have
    reached the harness."""

    opening: OpenExecution
    delivered: tuple[str, ...]


class KnowEngines(Ask[None], frozen=True, kw_only=True):
    """Of a cell's last life, whatever role it has now."""

    cell: int
    engines: tuple[Ref, ...]


class RestoreKeys(Ask[None], frozen=True, kw_only=True):
    """The last of them: keys that are dead. Answered when the proxy takes calls."""

    closed: tuple[str, ...]


class CallDelivered(Tell, frozen=True, kw_only=True):
    """A proxy to its keeper: the answer has reached the harness; totals now."""

    execution: str
    call: str
    totals: ProxyTotals


class Happened(Tell, frozen=True, kw_only=True):
    """A proxy to its keeper: it has logged this."""

    level: str
    event: str
    fields: dict[str, Any]


class GetProxyTotals(Ask[ProxyTotals], frozen=True, kw_only=True):
    """Totals now."""
