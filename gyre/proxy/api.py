"""What an API of the proxy is: a translation between its wire form and calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from gyre.proxy.conversation import CallError, CallRequest, Completion, Opening, bad_request
from gyre.proxy.live import Part

# Headers by which harnesses name a session or an agent. They only ever tell calls apart.
_HINT_HEADERS = (
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
    "session-id",
    "thread-id",
    "x-session-id",
)
# A delta is at most so long, that no client meets a line beyond its reader's limit.
_DELTA_CHARACTERS = 8192

_Body = TypeVar("_Body")


class Speech(Protocol):
    """What the requests and errors at one path look like."""

    path: str

    def parse(self, body: bytes, headers: Mapping[str, str]) -> CallRequest:
        """Raises CallError, and nothing else, whatever the body is."""

    def error(self, error: CallError) -> bytes:
        """The body of an answer with the error's status."""


class EventStream(Protocol):
    """One answer as server-sent events, in the order of its methods."""

    def begin(self, opening: Opening) -> Iterator[bytes]:
        """Before its first word."""

    def say(self, part: Part, text: str) -> Iterator[bytes]:
        """More of its reasoning, then of its text."""

    def end(self, completion: Completion) -> Iterator[bytes]:
        """What follows the text: tool calls, the reason to stop, usage."""

    def error(self, error: CallError) -> bytes:
        """The end of a stream that cannot go on, whatever it has carried."""


class Api(Speech, Protocol):
    """Calls are posted to `path`; `keep_alive` is what a waiting stream may carry. A streamed answer says the
    same as a whole one."""

    keep_alive: bytes

    def answer(self, request: CallRequest, completion: Completion) -> bytes:
        """The body of a whole answer."""

    def stream(self, request: CallRequest) -> EventStream:
        """For one answer."""


class TokenCounter(Speech, Protocol):
    """Tells how many tokens a call's prompt would have, without making it."""

    def count(self, prompt_tokens: int) -> bytes:
        """The body of the answer."""


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


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes, what: str) -> _Body:
    """The body as a request of its API, which `what` names. Raises CallError."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise bad_request(f"the body is not {what}: {error}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def parse_arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any] | str:
    """A call's arguments as an object; the text as it came where that is none."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any]) if arguments else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool in the one form that conversations have, whichever API offers it."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}


def not_supported(place: str, kind: str) -> CallError:
    """For images and other content that a policy of text cannot read."""
    return bad_request(f"{place}.type = {kind!r} is not supported; send text")


def left_out(kind: str) -> str:
    """The same where a tool's result has it: an error would end the harness for what the policy asked of a
    tool, and the policy could not learn that it is of no use."""
    return f"[{kind} left out: this model reads text only]"


def deltas(text: str) -> Iterator[str]:
    """A text in pieces for a stream."""
    for start in range(0, len(text), _DELTA_CHARACTERS):
        yield text[start : start + _DELTA_CHARACTERS]


def server_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """A named server-sent event, whose data repeats the name as its `type`."""
    data = msgspec.json.encode({"type": name, **fields})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def openai_error(error: CallError) -> dict[str, Any]:
    """As all of OpenAI's APIs say it."""
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = "server_error" if error.status >= 500 else kinds.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}
