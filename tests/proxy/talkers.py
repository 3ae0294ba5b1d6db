"""The vendors' own clients in conversations as harnesses have them: what they got goes back as it came."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import anthropic
import openai

from gyre.proxy import ExecutionAccess
from tests.proxy.house import openai_client

SYSTEM = "You tidy an inbox."
_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"folder": {"type": "string"}}}


@dataclass
class Heard:
    """An answer; `calls` are id, name and arguments, `tokens` those of the prompt and of the answer."""

    text: str
    reasoning: str
    calls: list[tuple[str, str, Any]]
    stop: str | None
    tokens: tuple[int, int]


class Talker(Protocol):
    async def say(self, text: str | tuple[str, ...], stream: bool) -> Heard:
        """Several texts are blocks of one message."""

    async def results(self, results: dict[str, str], stream: bool) -> Heard:
        """Of tool calls, by their ids."""


def read(arguments: str) -> Any:
    """As text where they are no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _parts(kind: str, text: str | tuple[str, ...]) -> list[dict[str, str]]:
    return [{"type": kind, "text": part} for part in ((text,) if isinstance(text, str) else text)]


@dataclass
class ChatTalker:
    client: openai.AsyncOpenAI
    messages: list[Any] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])

    async def say(self, text: str | tuple[str, ...], stream: bool) -> Heard:
        self.messages.append(
            {"role": "user", "content": text if isinstance(text, str) else _parts("text", text)}
        )
        return await self._ask(stream)

    async def results(self, results: dict[str, str], stream: bool) -> Heard:
        for call, content in results.items():
            self.messages.append({"role": "tool", "tool_call_id": call, "content": content})
        return await self._ask(stream)

    async def _ask(self, stream: bool) -> Heard:
        tool = {"type": "function", "function": {"name": "put", "parameters": _PARAMETERS}}
        asked: Any = {"model": "m", "messages": self.messages, "tools": [tool]}
        if stream:
            options = {"include_usage": True}
            async with self.client.chat.completions.stream(**asked, stream_options=options) as events:
                answer: Any = await events.get_final_completion()
        else:
            answer = await self.client.chat.completions.create(**asked)
        choice = answer.choices[0]
        self.messages.append(choice.message.model_dump(exclude_none=True))
        return Heard(
            text=choice.message.content or "",
            reasoning=getattr(choice.message, "reasoning_content", None) or "",
            calls=[
                (call.id, call.function.name, read(call.function.arguments))
                for call in choice.message.tool_calls or ()
            ],
            stop=choice.finish_reason,
            tokens=(answer.usage.prompt_tokens, answer.usage.completion_tokens),
        )


@dataclass
class MessagesTalker:
    client: anthropic.AsyncAnthropic
    messages: list[Any] = field(default_factory=list)

    async def say(self, text: str | tuple[str, ...], stream: bool) -> Heard:
        self.messages.append({"role": "user", "content": _parts("text", text)})
        return await self._ask(stream)

    async def results(self, results: dict[str, str], stream: bool) -> Heard:
        blocks = [
            {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": content}]}
            for call, content in results.items()
        ]
        self.messages.append({"role": "user", "content": blocks})
        return await self._ask(stream)

    async def _ask(self, stream: bool) -> Heard:
        asked: Any = {
            "model": "m",
            "max_tokens": 200,
            "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
            "messages": self.messages,
            "tools": [{"name": "put", "input_schema": _PARAMETERS}],
            "thinking": {"type": "adaptive"},
        }
        if stream:
            async with self.client.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await self.client.messages.create(**asked)
        self.messages.append({"role": "assistant", "content": answer.content})
        usage = answer.usage
        return Heard(
            text="".join(block.text for block in answer.content if block.type == "text"),
            reasoning="".join(block.thinking for block in answer.content if block.type == "thinking"),
            calls=[
                (block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"
            ],
            stop=answer.stop_reason,
            tokens=(usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens),
        )


@dataclass
class ResponsesTalker:
    client: openai.AsyncOpenAI
    input: list[Any] = field(default_factory=list)

    async def say(self, text: str | tuple[str, ...], stream: bool) -> Heard:
        self.input.append({"role": "user", "content": _parts("input_text", text)})
        return await self._ask(stream)

    async def results(self, results: dict[str, str], stream: bool) -> Heard:
        for call, content in results.items():
            self.input.append({"type": "function_call_output", "call_id": call, "output": content})
        return await self._ask(stream)

    async def _ask(self, stream: bool) -> Heard:
        tool = {"type": "function", "name": "put", "parameters": _PARAMETERS, "strict": False}
        asked: Any = {
            "model": "m",
            "instructions": SYSTEM,
            "input": self.input,
            "tools": [tool],
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
        if stream:
            async with self.client.responses.stream(**asked) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await self.client.responses.create(**asked)
        self.input += [item.model_dump(exclude_none=True) for item in answer.output]
        thoughts = [item for item in answer.output if item.type == "reasoning"]
        return Heard(
            text=answer.output_text,
            reasoning="".join(part.text for item in thoughts for part in item.summary),
            calls=[
                (item.call_id, item.name, read(item.arguments))
                for item in answer.output
                if item.type == "function_call"
            ],
            stop=answer.status,
            tokens=(answer.usage.input_tokens, answer.usage.output_tokens),
        )


@asynccontextmanager
async def anthropic_client(
    access: ExecutionAccess, **options: Any
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    base_url = access.base_url.removesuffix("/v1")
    settings = {"base_url": base_url, "api_key": access.key, "max_retries": 0} | options
    async with anthropic.AsyncAnthropic(**settings) as client:
        yield client


@asynccontextmanager
async def talking(api: str, access: ExecutionAccess) -> AsyncIterator[Talker]:
    """A conversation by one of the APIs."""
    if api == "messages":
        async with anthropic_client(access) as client:
            yield MessagesTalker(client)
        return
    async with openai_client(access) as opened:
        yield ChatTalker(opened) if api == "chat" else ResponsesTalker(opened)
