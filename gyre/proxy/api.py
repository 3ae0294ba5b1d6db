"""What an API of the proxy is: a translation between its wire form and calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from gyre.proxy.conversation import CallError, CallRequest, Completion

# Headers by which harnesses name a session or an agent. They only ever tell calls apart.
_HINT_HEADERS = (
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
    "session-id",
    "thread-id",
    "x-session-id",
)


class Api(Protocol):
    """`path` is where its calls are posted; `keep_alive` is what a waiting stream may carry."""

    path: str
    keep_alive: bytes

    def parse(self, body: bytes, headers: Mapping[str, str]) -> CallRequest:
        """Raises CallError, and nothing else, whatever the body is."""

    def answer(self, completion: Completion) -> bytes:
        """The body of a whole answer."""

    def events(self, request: CallRequest, completion: Completion) -> Iterator[bytes]:
        """The same as a stream of server-sent events, in order, the end included."""

    def error(self, error: CallError) -> bytes:
        """The body of an answer with the error's status."""

    def error_event(self, error: CallError) -> bytes:
        """The error within a stream that has begun."""


def key_of(headers: Mapping[str, str]) -> str | None:
    """The key a harness was given, from the headers that clients put it in."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key")


def hints_of(headers: Mapping[str, str]) -> tuple[str, ...]:
    """What the harness says of who is calling."""
    return tuple(f"{name}={headers[name]}" for name in _HINT_HEADERS if name in headers)


def says_retry(headers: Mapping[str, str]) -> bool:
    """Its client counts a repetition. Most never do, so nothing may depend on it alone."""
    return headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
