"""The real mini-swe-agent with the configuration of examples/smollm2.toml."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from gyre.harness.actor import HarnessActorConfig
from gyre.job import load_job
from gyre.schedule.messages import ExecutionFinished
from tests.harness.conftest import needs_bwrap
from tests.harness.neighbours import running

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = load_job(EXAMPLES / "smollm2.toml")
MINI = yaml.safe_load((EXAMPLES / "smollm2" / "mini.yaml").read_text())

Message = dict[str, Any]

PROSE = "The file has bugs, and I would look at them one after another."


def actions(reply: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What mini-swe-agent finds to run in a reply."""
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    from minisweagent.exceptions import FormatError
    from minisweagent.models.utils.actions_text import parse_regex_actions

    try:
        found = parse_regex_actions(
            reply, action_regex=MINI["model"]["action_regex"], format_error_template="none"
        )
    except FormatError:
        return []
    return [action["command"] for action in found]


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("```bash\nls\n```", ["ls"]),
        ("```sh\nls\npwd\n```\nIt lists.", ["ls\npwd"]),
        ("So:\n\n```bash\nls\n```\nor\n```bash\npwd\n```", ["ls"]),
        ("```bash\nls\nsed -i 's/a", ["ls\nsed -i 's/a"]),
        ("#!/bin/bash\nls", ["#!/bin/bash\nls"]),
        ("```python\nprint(1)\n```\nprints.", []),
        ("```python\nprint(1)\n```\n```bash\nls\n```", ["ls"]),
        (PROSE, []),
    ],
)
def test_first_script_of_a_reply_is_the_action(
    reply: str, found: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert actions(reply, monkeypatch, tmp_path) == found


def policy(key: str, messages: list[Message]) -> str:
    """The first execution copies the script of its prompt, the second half of it, the third writes prose."""
    script = messages[1]["content"].split("```bash\n")[1].split("```")[0].splitlines()
    lines = {"00": script, "01": script[:6], "02": []}[key.split(".")[1][:2]]
    return "Here it is:\n\n```bash\n" + "\n".join(lines) + "\n```" if lines else PROSE


@pytest.fixture
async def model(tmp_path: Path) -> AsyncIterator[tuple[Path, dict[str, list[list[Message]]]]]:
    """A model on a unix socket, and the requests by key that it saw."""
    seen: dict[str, list[list[Message]]] = {}

    async def complete(request: web.Request) -> web.Response:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        messages = (await request.json())["messages"]
        seen.setdefault(key, []).append(messages)
        message = {"role": "assistant", "content": policy(key, messages)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
            | {"choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    (tmp_path / "proxy").mkdir()
    socket = tmp_path / "proxy" / "socket"
    await web.UnixSite(runner, str(socket)).start()
    yield socket, seen
    await runner.cleanup()


@needs_bwrap
@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_executions_of_a_group_differ_by_what_the_policy_wrote(
    tmp_path: Path, model: tuple[Path, dict[str, list[list[Message]]]]
) -> None:
    config = HarnessActorConfig(
        harness=JOB.harness,
        tasks=JOB.tasks,
        evaluator=JOB.evaluator,
        eval=JOB.eval,
        group_size=3,
        run_dir=tmp_path / "run",
    )
    async with running(config) as job:
        job.neighbours.unix_socket, seen = model
        await job.dispatch()
        # Three imports of litellm on a busy machine: as long as the test may take.
        while len(job.neighbours.of(ExecutionFinished)) < 3:
            job.neighbours.changed.clear()
            await job.neighbours.changed.wait()
        results = await job.results(3)
    assert [(r.reason, r.score) for r in results] == [
        ("completed", 1.0),
        ("completed", pytest.approx(0.6)),
        ("completed", pytest.approx(0.2)),
    ]
    copied, halved, prose = (seen[f"key-g000000.0{index}-1"] for index in range(3))
    assert len(copied) == 1, "the script's last line submits"
    assert [len(messages) for messages in halved] == [2, 4, 6]
    assert halved[2][3]["content"].startswith("Exit code 0")
    # A reply without a script is dropped from the history.
    assert [len(messages) for messages in prose] == [2, 3, 4]
    assert {message["role"] for message in prose[2]} == {"system", "user"}
