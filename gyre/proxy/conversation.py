"""What a harness asks for and gets, whichever API it speaks: each API translates into these and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

MessageRole = Literal["system", "user", "assistant", "tool"]
AnswerReason = Literal["stop", "length", "tool_calls"]

_BILLING = "x-anthropic-billing-header:"
_WIRE_ID = re.compile(r".+-\d+-\d{4,}")


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the parsed object, or the text as it came where that is none. `raw`: the sampled text
    that it was read from, where it was."""

    id: str
    name: str
    arguments: dict[str, Any] | str
    raw: str | None = None

    @property
    def arguments_json(self) -> str:
        """As APIs carry them."""
        if isinstance(self.arguments, str):
            return self.arguments
        return msgspec.json.encode(self.arguments).decode()

    @property
    def input_json(self) -> str:
        """As an API carries them that knows objects only: text in the place where Claude Code puts such,
        which fits no tool, so that the tool refuses it."""
        if isinstance(self.arguments, str):
            unparsed = {"raw": self.arguments, "len": len(self.arguments)}
            return msgspec.json.encode({"__unparsedToolInput": unparsed}).decode()
        return self.arguments_json


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is the message's text blocks, empty ones left out: null, "" and [] are the same.
    `reasoning` is what an assistant thought before it. `sampled_as` is the `wire_id` of the call that the
    ids or signatures of a repeated answer name: a hint, which anybody could have written."""

    role: MessageRole
    content: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    sampled_as: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(self.content)

    def to_openai(self) -> dict[str, Any]:
        """As OpenAI's chat API writes it, arguments as JSON text; so it stands in records too, where blocks
        stay apart: a sub-agent is known by one that is its whole prompt."""
        content: Any = self.text
        if len(self.content) > 1:
            content = [{"type": "text", "text": block} for block in self.content]
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


class ToolPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's own name within a namespace."""

    namespace: str
    name: str


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of a request, and the tools it offers as OpenAI's chat API writes them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. `max_tokens` is what the harness asks at most. `hints` are identifying headers of
    the harness (its session, agent): a call with other hints is no repetition. `is_retry`: it says so.
    `namespaces` are those of tools that have one, as the policy knows the tool."""

    conversation: Conversation
    model: str
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    parse_tools: bool = True
    hints: tuple[str, ...] = ()
    is_retry: bool = False
    namespaces: dict[str, ToolPlace] = {}


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before its first word."""

    call: str
    model: str
    created_s: int
    prompt_tokens: int
    cached_tokens: int = 0


class Completion(Opening, frozen=True, kw_only=True):
    """A recorded answer. Token counts are true ones; `reasoning_tokens` of the `completion_tokens` were
    thought."""

    message: Message
    finish_reason: AnswerReason
    completion_tokens: int
    reasoning_tokens: int = 0


class CallError(Exception):
    """A call that ends without an answer: `status` and `code` as HTTP and OpenAI name it."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s


def wire_id(call: str) -> str:
    """A call's id in the characters that all APIs allow in ids."""
    return call.replace(".", "-")


def is_wire_id(text: str) -> bool:
    """Whether a call's id looks so: execution, attempt and number. A vendor's ids do not."""
    return _WIRE_ID.fullmatch(text) is not None


def bad_request(message: str) -> CallError:
    """The request cannot be served as it is."""
    return CallError(400, message, code="invalid_request")


def prompt_too_long(prompt_tokens: int, window_tokens: int) -> CallError:
    """Harnesses compact their context when they read these words."""
    message = f"prompt is too long: {prompt_tokens} tokens > {window_tokens} maximum"
    return CallError(400, message, code="context_length_exceeded")


def execution_closed() -> CallError:
    """400 and not 410 or 429: it is the status on which harnesses end instead of trying again."""
    return CallError(400, "this execution has ended; its key admits no more calls", code="execution_closed")


def unavailable(message: str) -> CallError:
    """Nothing was sampled; harnesses try again."""
    return CallError(503, message, code="unavailable", retry_after_s=1)


def internal(error: Exception) -> CallError:
    """A fault of the proxy's own."""
    return CallError(500, f"{type(error).__name__}: {error}", code="internal")


def without_billing(blocks: Iterable[str]) -> tuple[str, ...]:
    """A system prompt without the line that Claude Code puts before it for its vendor's books: it changes
    from call to call. It is a block of its own, or the first line of one where a gateway joined them."""
    kept = (block.partition("\n")[2] if block.startswith(_BILLING) else block for block in blocks)
    return tuple(block for block in kept if block)


def plain_numbers(value: Any) -> Any:
    """The same JSON value with whole floats as integers: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    return value
