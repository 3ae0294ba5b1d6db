"""A harness of one's own as an actor: the agent of the quickstart, with asyncio and one pool of connections.

`custom_harness.toml` names it. It tidies an inbox with the tool `put`, hands the box in it to a sub-agent
with `delegate`, and begins a new conversation when the prompt grows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from gyre.harness import Harness, Outcome, Play

FOLDERS = ("data", "docs", "images", "code")
BOX = "box"

Message = dict[str, Any]


def tool(name: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


PUT, DELEGATE = tool("put", "entry"), tool("delegate", "prompt")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`[harness.options]` of the job file."""

    max_turns: int = 24
    compact_tokens: int = 75


class Tidy(Harness):
    """Plays every execution of the job; what they share is the pool."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def started(self) -> None:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def stopping(self) -> None:
        await self._http.close()

    async def play(self, play: Play) -> Outcome:
        session = Session(play, self._http, self._options)
        try:
            return Outcome(text=await session.run())
        except TurnLimit:
            return Outcome(completed=False, detail=f"not done after {self._options.max_turns} turns")


class TurnLimit(Exception):
    """The execution has used its turns."""


class Session:
    """One execution."""

    def __init__(self, play: Play, http: aiohttp.ClientSession, options: Options) -> None:
        self._play = play
        self._http = http
        self._options = options
        self._turns = 0
        inbox = play.workspace / "inbox"
        self._box = files(inbox / BOX)
        self._inbox = files(inbox) + ([BOX] if self._box else [])

    async def run(self) -> str:
        """The main agent's last text."""
        user = f"{self._play.prompt.strip()}\n{position(self._inbox, 'inbox')}"
        return await self._converse("You tidy an inbox.", user, self._inbox, [PUT, DELEGATE])

    async def _converse(self, system: str, user: str, pile: list[str], tools: list[Any]) -> str:
        messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        prompt_tokens = 0
        while True:
            if prompt_tokens > self._options.compact_tokens and pile:
                messages = await self._compact(messages, pile)
            reply, prompt_tokens = await self._ask(messages, tools)
            messages.append(reply)
            calls = reply.get("tool_calls") or []
            if not calls:
                return reply.get("content") or ""
            for call in calls:
                result = await self._use(call["function"], pile)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def _compact(self, messages: list[Message], pile: list[str]) -> list[Message]:
        request = {"role": "user", "content": "Summarise what was done so far."}
        reply, _ = await self._ask([*messages, request], [])
        where = position(pile, "box" if pile is self._box else "inbox")
        user = f"The session so far: {reply.get('content') or ''}\n{where}"
        return [messages[0], {"role": "user", "content": user}]

    async def _ask(self, messages: list[Message], tools: list[Any]) -> tuple[Message, int]:
        if self._turns == self._options.max_turns:
            raise TurnLimit
        self._turns += 1
        request = {"model": self._play.model, "messages": messages, **({"tools": tools} if tools else {})}
        key = {"Authorization": f"Bearer {self._play.key}"}
        url = f"{self._play.base_url}/chat/completions"
        async with self._http.post(url, json=request, headers=key, raise_for_status=True) as response:
            answer = await response.json()
        return answer["choices"][0]["message"], answer["usage"]["prompt_tokens"]

    async def _use(self, function: dict[str, str], pile: list[str]) -> str:
        argument = first_argument(function["arguments"])
        if function["name"] == "put":
            return self._put(argument, pile)
        if function["name"] != "delegate" or pile is not self._inbox:
            return "unknown tool"
        if pile[:1] != [BOX]:
            return "not a box"
        text = await self._converse(
            f"You file a box.\n{position(self._box, BOX)}", argument, self._box, [PUT]
        )
        if not self._box:
            pile.remove(BOX)
        return text

    def _put(self, entry: str, pile: list[str]) -> str:
        item, folder = pile[0] if pile else "", entry.rpartition(" ")[2]
        if folder not in FOLDERS or entry != f"{item.rpartition('.')[2]} {folder}":
            return "unknown entry"
        inbox = self._play.workspace / "inbox"
        source = inbox / BOX / item if pile is self._box else inbox / item
        source.rename(self._play.workspace / folder / item)
        pile.pop(0)
        return position(pile, "box" if pile is self._box else "inbox")


def files(folder: Path) -> list[str]:
    """Names, in order."""
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def position(pile: list[str], name: str) -> str:
    """What an agent is told of its pile."""
    return f"next: {pile[0]}" if pile else f"{name} is empty"


def first_argument(arguments: str) -> str:
    """The one argument of a tool call, empty where the model wrote something else."""
    try:
        values = list(json.loads(arguments).values())
    except (ValueError, AttributeError):
        return ""
    return values[0] if values and isinstance(values[0], str) else ""
