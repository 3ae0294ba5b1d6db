"""Harnesses, as many as asked, in a process of their own: each makes its calls one after another."""

from __future__ import annotations

import asyncio
import random
import re
import time
from typing import Any

import msgspec

from gyre.actors import Actor, Ask, Ref, handles
from gyre.cell.engine.base import GenerateRequest, SamplingParams
from gyre.cell.messages import Generate

_CALL = re.compile(rb'"id": ?"chatcmpl-([^"]+)"')
_CREATED = re.compile(rb'"created": ?(\d+)')
_LIMIT_BYTES = 2**27


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where a harness's calls go, with which key."""

    host: str
    port: int
    path: str
    key: str


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Of each call: seconds until its end, seconds from first token to first byte."""

    seconds: list[float]
    first_bytes: dict[str, float]
    first_byte_s: list[float]


class Drive(Ask[Calls], frozen=True, kw_only=True):
    """A harness for each of `targets`, which begin within `spread_s` of each other: a conversation of `turns`
    calls that begins with `first` and goes on with `more` each time."""

    targets: tuple[Target, ...]
    turns: int
    stream: bool
    first: list[dict[str, Any]]
    more: str
    tools: list[dict[str, Any]]
    spread_s: float


class DriveEngine(Ask[Calls], frozen=True, kw_only=True):
    """The same at an engine, without anybody between: calls with prompts of so many tokens."""

    engine: Ref
    harnesses: int
    turns: int
    prompt_tokens: int
    max_new_tokens: int
    spread_s: float


class Load(Actor):
    @handles(Drive, concurrent=True)
    async def drive(self, message: Drive) -> Calls:
        calls = Calls(seconds=[], first_bytes={}, first_byte_s=[])
        async with asyncio.TaskGroup() as group:
            for index, target in enumerate(message.targets):
                group.create_task(_harness(message, target, index, calls))
        return calls

    @handles(DriveEngine, concurrent=True)
    async def drive_engine(self, message: DriveEngine) -> Calls:
        calls = Calls(seconds=[], first_bytes={}, first_byte_s=[])
        async with asyncio.TaskGroup() as group:
            for index in range(message.harnesses):
                group.create_task(_direct(message, index, calls))
        return calls


async def _direct(message: DriveEngine, index: int, calls: Calls) -> None:
    await asyncio.sleep(random.Random(index).random() * message.spread_s)
    prompt = tuple(range(100, 100 + message.prompt_tokens))
    for turn in range(message.turns):
        request = GenerateRequest(
            call=f"direct{index}-0-{turn:04d}",
            session=f"direct{index}",
            prompt_ids=prompt,
            prompt_tokens=len(prompt),
            sampling=SamplingParams(max_new_tokens=message.max_new_tokens),
        )
        began = time.monotonic()
        async for _ in message.engine.stream(Generate(request=request)):
            calls.first_bytes.setdefault(request.call, time.monotonic())
        calls.seconds.append(time.monotonic() - began)


async def _harness(message: Drive, target: Target, index: int, calls: Calls) -> None:
    await asyncio.sleep(random.Random(index).random() * message.spread_s)
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=_LIMIT_BYTES)
    messages = [*message.first]
    options = {"model": "m", "stream": message.stream, "tools": message.tools}
    for _ in range(message.turns):
        body = msgspec.json.encode(options | {"messages": messages})
        began = time.monotonic()
        writer.write(_head(target, len(body)) + body)
        first_at, answer = await read_answer(reader)
        calls.seconds.append(time.monotonic() - began)
        call = _CALL.search(answer)
        assert call is not None, answer[:500]
        calls.first_bytes[call[1].decode()] = first_at
        if (created := _CREATED.search(answer)) and len(created[1]) > 12:
            calls.first_byte_s.append(first_at - int(created[1]) / 1e9)
        messages += [{"role": "assistant", "content": said(answer, message.stream)}]
        messages += [{"role": "user", "content": message.more}]
    writer.close()


def _head(target: Target, length: int) -> bytes:
    return (
        f"POST {target.path} HTTP/1.1\r\nHost: {target.host}\r\nAuthorization: Bearer {target.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def read_answer(reader: asyncio.StreamReader) -> tuple[float, bytes]:
    """When the body's first bytes came, and the body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head + await reader.read(1000)
    if b"transfer-encoding: chunked" not in head:
        length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        body = await reader.readexactly(length)
        return time.monotonic(), body
    first_at, pieces = 0.0, []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
        first_at = first_at or time.monotonic()
    await reader.readexactly(2)
    return first_at, b"".join(pieces)


def said(answer: bytes, stream: bool) -> str:
    if not stream:
        whole = msgspec.json.decode(answer)
        return str(whole["choices"][0]["message"]["content"])
    events = [msgspec.json.decode(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)
