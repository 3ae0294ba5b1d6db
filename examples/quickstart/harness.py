"""The quickstart's harness: an agent that files what lies in `inbox/`, over OpenAI chat completions.

It knows an address, a key and a folder, and nothing of Gyre. The main agent files one item after the other
with the tool `put` and hands a box of items to a sub-agent with `delegate`. It compacts its context when it
grows, and it now and then hangs up before the answer and asks the same again, as real harnesses do.

Standard library only and few imports: hundreds of starts must be cheap (`python -I -S harness.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable

COMPACT_TOKENS = 75  # a prompt longer than this is compacted before the next call
MAX_TURNS = 24  # calls of one execution, sub-agents and summaries included
RETRY_EVERY = 12  # one call in so many is asked twice
HANG_UP_S = 0.02  # how long an answer that will be asked for twice is waited for
TRIES = 8  # of one call, where the server fails

FOLDERS = ("data", "docs", "images", "code")
BOX = "box"

MAIN_SYSTEM = "You tidy an inbox."
SUMMARY_REQUEST = "Summarise what was done so far."
INBOX_EMPTY = "inbox is empty"
BOX_EMPTY = "box is empty"
UNKNOWN_ENTRY = "unknown entry"
UNKNOWN_TOOL = "unknown tool"
NOT_A_BOX = "not a box"
REMINDERS = 2  # how often an agent that forgot its tools is told of them


def tool_schema(name: str, parameter: str) -> dict:
    """The smallest schema of a tool with one text parameter."""
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


PUT = tool_schema("put", "entry")
DELEGATE = tool_schema("delegate", "prompt")
MAIN_TOOLS = [PUT, DELEGATE]
BOX_TOOLS = [PUT]


def next_text(item: str) -> str:
    """What tells an agent its current item."""
    return f"next: {item}"


def entry(item: str, folder: str) -> str:
    """What `put` is told: the item's extension and the folder it goes to."""
    return f"{item.rpartition('.')[2]} {folder}"


def reminder(position: str) -> str:
    """What an agent hears that stops while items are left."""
    return f"use a tool\n{position}"


def main_user(prompt: str, position: str) -> str:
    """The main agent's first user text; `position` is a pile's `position()`."""
    return f"{prompt}\n{position}"


def box_system(position: str) -> str:
    """The sub-agent's system prompt; its first user text is the prompt it was delegated."""
    return f"You file a box.\n{position}"


def resumed_user(summary: str, position: str) -> str:
    """The first user text after a compaction."""
    return f"The session so far: {summary}\n{position}"


Ask = Callable[[list, list | None], tuple[dict, int]]
Move = Callable[[str, str], None]


class TurnLimit(Exception):
    """The execution has used its turns."""


class Pile:
    """Items that are to be filed, in order: the inbox, or the box in it."""

    def __init__(self, items: list[str], empty: str) -> None:
        self.items = items
        self._empty = empty

    def position(self) -> str:
        """Where an agent stands in the pile."""
        return next_text(self.items[0]) if self.items else self._empty


class Session:
    """One execution. `ask(messages, tools)` gives the assistant's message and the prompt's length in tokens;
    `move(item, folder)` files an item, whose name is a path below the inbox. Both come from outside, so that
    demonstrations can be written by playing a session with a model that knows."""

    def __init__(self, ask: Ask, move: Move, prompt: str, files: list[str], boxed: list[str]) -> None:
        self._ask = ask
        self._move = move
        self._prompt = prompt
        self._turns = 0
        self._box = Pile(list(boxed), BOX_EMPTY)
        self._inbox = Pile(list(files) + ([BOX] if boxed else []), INBOX_EMPTY)

    def run(self) -> str:
        """The main agent's last text. Raises TurnLimit."""
        user = main_user(self._prompt, self._inbox.position())
        return self._converse(MAIN_SYSTEM, user, self._inbox, MAIN_TOOLS)

    def _converse(self, system: str, user: str, pile: Pile, tools: list) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        tokens, reminders = 0, 0
        while True:
            if tokens > COMPACT_TOKENS and pile.items:
                messages = self._compact(messages, pile)
            reply, tokens = self._call(messages, tools)
            messages.append(reply)
            if not reply.get("tool_calls"):
                if not pile.items or reminders == REMINDERS:
                    return reply.get("content") or ""
                reminders += 1
                messages.append({"role": "user", "content": reminder(pile.position())})
            for call in reply.get("tool_calls") or ():
                result = self._use_tool(call.get("function", {}), pile)
                messages.append({"role": "tool", "tool_call_id": call.get("id"), "content": result})

    def _compact(self, messages: list, pile: Pile) -> list:
        request = {"role": "user", "content": SUMMARY_REQUEST}
        reply, _ = self._call([*messages, request], None)
        user = resumed_user(reply.get("content") or "", pile.position())
        return [messages[0], {"role": "user", "content": user}]

    def _call(self, messages: list, tools: list | None) -> tuple[dict, int]:
        if self._turns == MAX_TURNS:
            raise TurnLimit
        self._turns += 1
        return self._ask(messages, tools)

    def _use_tool(self, function: dict, pile: Pile) -> str:
        name, argument = function.get("name"), first_argument(function.get("arguments"))
        if name == "put":
            return self._put(argument, pile)
        if name == "delegate" and pile is self._inbox:
            return self._delegate(argument)
        return UNKNOWN_TOOL

    def _put(self, argument: str, pile: Pile) -> str:
        item, folder = pile.items[0] if pile.items else "", argument.rpartition(" ")[2]
        if folder not in FOLDERS or argument != entry(item, folder):
            return UNKNOWN_ENTRY
        pile.items.pop(0)
        self._move(f"{BOX}/{item}" if pile is self._box else item, folder)
        return pile.position()

    def _delegate(self, prompt: str) -> str:
        if self._inbox.items[:1] != [BOX]:
            return NOT_A_BOX
        text = self._converse(box_system(self._box.position()), prompt, self._box, BOX_TOOLS)
        if not self._box.items:
            self._inbox.items.remove(BOX)
        return text


def first_argument(arguments: object) -> str:
    """The one argument of a tool call, empty where the model wrote something else."""
    try:
        values = list(json.loads(arguments).values()) if isinstance(arguments, str) else []
    except (ValueError, AttributeError):
        values = []
    return values[0] if values and isinstance(values[0], str) else ""


class Refused(Exception):
    """The server will not answer this request, however often it is asked."""


class Connection:
    """A keep-alive HTTP/1.1 connection to the model."""

    def __init__(self, base_url: str, key: str) -> None:
        authority, _, path = base_url.removeprefix("http://").partition("/")
        host, _, port = authority.rpartition(":")
        self._address = (host, int(port))
        self._path = f"/{path.rstrip('/')}/chat/completions"
        self._head = f"Host: {authority}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        self._socket: socket.socket | None = None
        self._buffer = b""

    def post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises OSError or ValueError where the connection broke."""
        self._send(body)
        status, headers = self._read_head()
        while status < 200:
            status, headers = self._read_head()
        answer = self._read_body(headers)
        if headers.get("connection", "").lower() == "close":
            self.close()
        return status, answer

    def hang_up(self, body: bytes) -> None:
        """Sends a request and closes before its answer."""
        self._send(body)
        assert self._socket is not None
        self._socket.settimeout(HANG_UP_S)
        with contextlib.suppress(TimeoutError):
            self._socket.recv(1)
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def _send(self, body: bytes) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(self._address)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST {self._path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)

    def _read_head(self) -> tuple[int, dict[str, str]]:
        lines = self._read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:])
        return int(lines[0].split(" ")[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}

    def _read_body(self, headers: dict[str, str]) -> bytes:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return self._read_chunks()
        if "content-length" in headers:
            return self._read_exactly(int(headers["content-length"]))
        body = self._buffer
        while data := self._receive():
            body += data
        self.close()
        return body

    def _read_chunks(self) -> bytes:
        body = b""
        while size := int(self._read_until(b"\r\n").split(b";")[0], 16):
            body += self._read_exactly(size)
            self._read_until(b"\r\n")
        while self._read_until(b"\r\n"):
            pass
        return body

    def _read_until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._fill()
        line, _, self._buffer = self._buffer.partition(end)
        return line

    def _read_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _fill(self) -> None:
        data = self._receive()
        if not data:
            raise ConnectionError("the server closed its connection in the middle of an answer")
        self._buffer += data

    def _receive(self) -> bytes:
        assert self._socket is not None
        return self._socket.recv(65536)


def is_repeated(execution: str, call: int) -> bool:
    """Whether this call (from 1 on) hangs up before the answer and is made again."""
    return zlib.crc32(f"{execution}/{call}".encode()) % RETRY_EVERY == 0


class Model:
    """The policy behind its address. Failures of the server are waited out, a refusal is not."""

    def __init__(self, connection: Connection, model: str, execution: str) -> None:
        self._connection = connection
        self._model = model
        self._execution = execution
        self._calls = 0

    def ask(self, messages: list, tools: list | None) -> tuple[dict, int]:
        request = {"model": self._model, "messages": messages}
        if tools:
            request["tools"] = tools
        body = json.dumps(request).encode()
        self._calls += 1
        if is_repeated(self._execution, self._calls):
            try:
                self._connection.hang_up(body)
            except OSError:
                self._connection.close()
        answer = json.loads(self._post(body))
        return answer["choices"][0]["message"], answer.get("usage", {}).get("prompt_tokens", 0)

    def _post(self, body: bytes) -> bytes:
        failure = ""
        for attempt in range(TRIES):
            if failure:
                time.sleep(0.05 * 2**attempt)
            try:
                status, answer = self._connection.post(body)
            except (OSError, ValueError, IndexError) as error:
                self._connection.close()
                failure = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                return answer
            failure = f"{status} {answer[:500].decode(errors='replace')}"
            if status < 500 and status not in (408, 429):
                raise Refused(failure)
        raise Refused(failure)


def listing(folder: str) -> list[str]:
    """The files of a folder, in order."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_file())


def move(item: str, folder: str) -> None:
    """Files an item of the workspace."""
    os.makedirs(folder, exist_ok=True)
    os.rename(f"inbox/{item}", f"{folder}/{os.path.basename(item)}")


def main() -> int:
    environment = os.environ
    with open(environment["GYRE_PROMPT_FILE"], encoding="utf-8") as file:
        prompt = file.read().strip()
    connection = Connection(environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"])
    model = Model(connection, environment.get("GYRE_MODEL", "policy"), environment.get("GYRE_EXECUTION", ""))
    box = f"inbox/{BOX}"
    boxed = listing(box) if os.path.isdir(box) else []
    try:
        print(Session(model.ask, move, prompt, listing("inbox"), boxed).run())
    except TurnLimit:
        print(f"stopped after {MAX_TURNS} turns")
    except Refused as error:
        print(f"the model refused: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
