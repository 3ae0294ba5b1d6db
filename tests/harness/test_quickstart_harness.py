"""The bundled harness: its conversation with a scripted model, and its HTTP with servers that misbehave."""

import asyncio
import importlib.util
import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

from gyre.harness.actor import HarnessActorConfig
from gyre.harness.config import EvalConfig, EvaluatorConfig, HarnessConfig, TasksConfig
from gyre.harness.output import Output
from gyre.harness.sandbox import Confined, Limits, Mount, ProcessSandbox, run
from tests.harness.conftest import MARK, needs_bwrap
from tests.harness.neighbours import running

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"

Message = dict[str, Any]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


harness = load("harness")
evaluate = load("evaluate")
PLACES = load("tasks").FOLDER_OF


def use(tool: str, argument: str, number: int = 0) -> Message:
    name = {"put": "entry", "delegate": "prompt"}.get(tool, "x")
    function = {"name": tool, "arguments": json.dumps({name: argument})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call-{number}", "type": "function", "function": function}],
    }


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def wise(messages: list[Message], tools: list[Message] | None) -> Message:
    """A model that knows the task: it reads where it stands from what it was last told."""
    if tools is None:
        return say("some were filed")
    told = [m["content"].splitlines()[-1] for m in messages if m["role"] in ("system", "user", "tool")]
    here = [line for line in told if line.startswith("next: ") or line.endswith("is empty")][-1]
    if here.endswith("is empty") or told[-1] == "the box is done":
        return say("the box is done" if here.startswith("box") else "done")
    item = here.removeprefix("next: ")
    if item == "box":
        return use("delegate", "file the box", len(messages))
    return use("put", harness.entry(item, PLACES[item.rpartition(".")[2]]), len(messages))


class Play:
    """A session with a model of `answers`, or with the wise one."""

    def __init__(self, *answers: Message, tokens: int = 0) -> None:
        self.answers = list(answers)
        self.tokens = tokens
        self.requests: list[tuple[list[Message], list[str]]] = []
        self.moves: list[tuple[str, str]] = []

    def ask(self, messages: list[Message], tools: list[Message] | None) -> tuple[Message, int]:
        names = [tool["function"]["name"] for tool in tools or ()]
        self.requests.append((list(messages), names))
        answer = self.answers.pop(0) if self.answers else wise(messages, tools)
        return answer, self.tokens or 30 * len(messages)

    def run(self, files: list[str], boxed: list[str]) -> str:
        session = harness.Session(self.ask, lambda *move: self.moves.append(move), "tidy", files, boxed)
        return str(session.run())


def test_a_wise_model_files_everything() -> None:
    play = Play(tokens=1)
    assert play.run(["a1.csv", "b2.md"], ["c3.png", "d4.py"]) == "done"
    assert play.moves == [
        ("a1.csv", "data"),
        ("b2.md", "docs"),
        ("box/c3.png", "images"),
        ("box/d4.py", "code"),
    ]


def test_the_main_agent_is_told_where_it_stands() -> None:
    play = Play(tokens=1)
    play.run(["a1.csv", "b2.md"], [])
    messages, tools = play.requests[-1]
    assert [m["content"] for m in messages if m["role"] != "assistant"] == [
        "You tidy an inbox.",
        "tidy\nnext: a1.csv",
        "next: b2.md",
        "inbox is empty",
    ]
    assert tools == ["put", "delegate"]


def test_the_sub_agents_first_user_text_is_its_prompt_and_its_last_text_the_result() -> None:
    play = Play(use("delegate", "please file these"), tokens=1)
    play.run([], ["c3.png"])
    first, tools = play.requests[1]
    assert [m["content"] for m in first] == ["You file a box.\nnext: c3.png", "please file these"]
    assert tools == ["put"]
    assert play.requests[-1][0][-1]["content"] == "the box is done"


def test_a_long_context_is_compacted() -> None:
    play = Play()
    files = [f"a{i}.csv" for i in range(6)]
    play.run(files, [])
    assert len(play.moves) == 6
    summaries = [messages for messages, tools in play.requests if not tools]
    assert summaries and all(messages[-1]["content"] == harness.SUMMARY_REQUEST for messages in summaries)
    (compacted,) = {len(messages) for messages in summaries}
    after = play.requests[[tools for _, tools in play.requests].index([]) + 1][0]
    assert [m["content"].split("\n")[0] for m in after] == [
        "You tidy an inbox.",
        "The session so far: some were filed",
    ]
    assert 30 * (compacted - 1) > harness.COMPACT_TOKENS


def test_nothing_is_compacted_when_all_is_filed() -> None:
    play = Play(tokens=10_000)
    play.run(["a1.csv"], [])
    assert [tools for _, tools in play.requests] == [["put", "delegate"]] * 2


def call(**function: str) -> Message:
    return {"role": "assistant", "tool_calls": [{"id": "x", "function": function}]}


BROKEN = [
    (use("put", "csv nowhere"), harness.UNKNOWN_ENTRY),
    (use("put", "md data"), harness.UNKNOWN_ENTRY),
    (use("burn", "data"), harness.UNKNOWN_TOOL),
    (use("delegate", "now"), harness.NOT_A_BOX),
    (call(name="put", arguments='{"entry": '), harness.UNKNOWN_ENTRY),
    (call(name="put", arguments="[3]"), harness.UNKNOWN_ENTRY),
    (call(name="put"), harness.UNKNOWN_ENTRY),
    (call(), harness.UNKNOWN_TOOL),
]


@pytest.mark.parametrize(("answer", "result"), BROKEN)
def test_a_broken_tool_call_gets_an_error_and_the_run_goes_on(answer: Message, result: str) -> None:
    play = Play(answer, tokens=1)
    play.run(["a1.csv"], [])
    assert play.requests[1][0][-1]["content"] == result
    assert play.moves == [("a1.csv", "data")]


def test_an_agent_that_stops_early_is_reminded_and_then_let_go() -> None:
    play = Play(use("put", "csv docs"), say("enough"), say("enough"), say("enough"), tokens=1)
    assert play.run(["a1.csv", "b2.md"], ["c3.png"]) == "enough"
    assert play.moves == [("a1.csv", "docs")]
    told = [m["content"] for m in play.requests[-1][0] if m["role"] == "user"]
    assert told[1:] == ["use a tool\nnext: b2.md"] * harness.REMINDERS


def test_turns_are_limited() -> None:
    play = Play(*[use("put", "nowhere")] * 100)
    with pytest.raises(harness.TurnLimit):
        play.run(["a1.csv"], [])
    assert len(play.requests) == harness.MAX_TURNS


# --- as a process, over HTTP --------------------------------------------------------------------


NEVER_REPEATS = next(
    name
    for number in range(1000)
    if not any(harness.is_repeated(name := f"g{number:06d}.00", call) for call in range(1, 13))
)


class Server:
    """Speaks HTTP by itself, so that it can break it. `script` has a name of a fault per request."""

    def __init__(self, *script: str) -> None:
        self.script = list(script)
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.bodies.append(body)
                if not await self.answer(self.script.pop(0) if self.script else "", body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, fault: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        request = json.loads(body)
        message = wise(request["messages"], request.get("tools"))
        answer = json.dumps({"choices": [{"message": message}], "usage": {"prompt_tokens": 1}}).encode()
        status = {"503": "503 Busy", "400": "400 Bad Request"}.get(fault, "200 OK")
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
        if fault == "closes before":
            return False
        if fault == "closes in the middle":
            writer.write(f"{head}Content-Length: {len(answer)}\r\n\r\n".encode() + answer[:10])
            return False
        if fault == "without length":
            writer.write(f"{head}\r\n".encode() + answer)
            return False
        if fault == "chunked":
            chunks = [answer[i : i + 7] for i in range(0, len(answer), 7)]
            text = b"".join(b"%x;x=y\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
            writer.write(f"{head}transfer-encoding: Chunked\r\n\r\n".encode() + text + b"0\r\nA: b\r\n\r\n")
        elif fault == "slowly":
            for byte in (
                f"HTTP/1.1 100 Continue\r\n\r\n{head}content-length:{len(answer)}\r\n\r\n".encode() + answer
            ):
                writer.write(bytes([byte]))
                await writer.drain()
        else:
            writer.write(f"{head}Content-Length: {len(answer)}\r\n\r\n".encode() + answer)
        await writer.drain()
        return True


@pytest.fixture
def play_harness(tmp_path: Path) -> Callable[..., Awaitable[tuple[int | None, float, str]]]:
    """Runs the harness against a server: its exit code, the workspace's score, what it said."""
    (tmp_path / "workspace" / "inbox" / "box").mkdir(parents=True)
    for name in ("a1.csv", "b2.md", "box/c3.png", "box/d4.py"):
        (tmp_path / "workspace" / "inbox" / name).write_text(name)
    (tmp_path / "prompt.md").write_text("tidy the inbox\n")

    async def play(server: Server, execution: str = NEVER_REPEATS) -> tuple[int | None, float, str]:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            confined = Confined(
                command=(sys.executable, "-I", "-S", str(FOLDER / "harness.py")),
                environment={
                    "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
                    "OPENAI_API_KEY": "key",
                    "GYRE_PROMPT_FILE": str(tmp_path / "prompt.md"),
                    "GYRE_EXECUTION": execution,
                },
                workspace=Mount(host=tmp_path / "workspace", inside="/workspace"),
                mounts=(),
                socket=None,
                mark=f"{MARK}quickstart/",
                limits=Limits(file_bytes=1 << 20),
            )
            output = Output()
            exit_ = await run(ProcessSandbox(), confined, output, timeout_s=30.0)
        return exit_.code, evaluate.score(str(tmp_path / "workspace")), output.tail()

    return play


Play_ = Callable[..., Awaitable[tuple[int | None, float, str]]]

FAULTS = ["", "chunked", "slowly", "without length", "503", "closes before", "closes in the middle"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_harness_gets_through(play_harness: Play_, fault: str) -> None:
    server = Server("", fault, fault, "")
    assert await play_harness(server) == (0, 1.0, "done\n")


async def test_a_request_that_is_refused_ends_the_run(play_harness: Play_) -> None:
    code, score, said = await play_harness(Server("", "400"))
    assert (code, score) == (1, 0.25)
    assert "the model refused: 400" in said


async def test_now_and_then_a_request_is_repeated(play_harness: Play_) -> None:
    """Which ones is a function of the execution."""
    calls = range(1, 7)
    repeated = next(
        name
        for i in range(1000)
        if sum(harness.is_repeated(name := f"g{i:06d}.00", call) for call in calls) == 1
    )
    server = Server()
    assert (await play_harness(server, repeated))[:2] == (0, 1.0)
    assert len(server.bodies) == len(set(server.bodies)) + 1
    assert sum(one == following for one, following in itertools.pairwise(server.bodies)) == 1


# --- under the HarnessActor ---------------------------------------------------------------------


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[tuple[str, Path, list[str]]]:
    """The wise model behind aiohttp, on TCP and on a unix socket: addresses, and the keys that it saw."""
    keys: list[str] = []

    async def complete(request: web.Request) -> web.Response:
        keys.append(request.headers["Authorization"].removeprefix("Bearer "))
        body = await request.json()
        message = wise(body["messages"], body.get("tools"))
        return web.json_response({"choices": [{"message": message}], "usage": {"prompt_tokens": 200}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    (tmp_path / "proxy").mkdir()
    socket = tmp_path / "proxy" / "socket"
    await web.UnixSite(runner, str(socket)).start()
    tcp = web.TCPSite(runner, "127.0.0.1", 0)
    await tcp.start()
    yield f"http://127.0.0.1:{runner.addresses[-1][1]}/v1", socket, keys
    await runner.cleanup()


@pytest.mark.parametrize("sandbox", ["process", pytest.param("bubblewrap", marks=needs_bwrap)])
async def test_a_group_and_an_evaluation_of_the_quickstart(
    tmp_path: Path, model: tuple[str, Path, list[str]], sandbox: Any
) -> None:
    python = ("{python}", "-I", "-S")
    recipe = f"{FOLDER / 'tasks.py'}:write_tasks"
    evaluator = (*python, str(FOLDER / "evaluate.py"), "{workspace}")
    config = HarnessActorConfig(
        harness=HarnessConfig(command=(*python, str(FOLDER / "harness.py")), sandbox=sandbox, timeout_s=30.0),
        tasks=TasksConfig(recipe=recipe, count=4, seed=0),
        evaluator=EvaluatorConfig(command=evaluator, sandbox=sandbox),
        eval=EvalConfig(recipe=recipe, count=3, seed=1),
        group_size=3,
        run_dir=tmp_path / "run",
    )
    async with running(config) as job:
        job.neighbours.base_url, job.neighbours.unix_socket, keys = model
        await job.dispatch()
        await job.dispatch(split="eval", groups=0)
        results = await job.results(6)
    assert [(r.reason, r.score) for r in results] == [("completed", 1.0)] * 6
    assert set(keys) == {f"key-{result.execution}-1" for result in results}
