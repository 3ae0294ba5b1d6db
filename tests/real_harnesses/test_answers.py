"""Answers that are not plain: several tool calls at once, broken ones, empty ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.proxy import GetProxyTotals
from tests.real_harnesses.commands import CODEX, MINI, OPENCODE, Harness
from tests.real_harnesses.law import check_law
from tests.real_harnesses.policy import Prompt, call
from tests.real_harnesses.stage import stage

pytestmark = pytest.mark.timeout(500)

TASK = "Write the numbers one, two and three to the files a.txt, b.txt and c.txt."
WANTED = {"a.txt": "one\n", "b.txt": "two\n", "c.txt": "three\n"}
COMMANDS = ("echo one > a.txt", "echo two > b.txt", "echo three > c.txt")


def at_once(prompt: Prompt) -> str:
    if TASK not in prompt.text or not prompt.tools:
        return "Numbers in files"
    if not prompt.said("c.txt"):
        return "I do all three.\n" + "\n".join(map(prompt.runs, COMMANDS))
    return prompt.ends("All are written.")


def broken(prompt: Prompt) -> str:
    """What no harness can run, one after the other, then what it can."""
    if TASK not in prompt.text or not prompt.tools:
        return "Numbers in files"
    good = prompt.runs(COMMANDS[0])
    tries = (
        call("no_such_tool", {"path": "a.txt"}),
        good.replace('"command": "', '"order": "').replace('"cmd": "', '"order": "'),
        f'{good}<tool_call>{{"name": </tool_call>',
        "\n".join(map(prompt.runs, COMMANDS)),
        cut_off(good),
        f"{good[:-30]}</tool_call>",
    )
    # mini-swe-agent shows its model the error, and not the call that it is about.
    done = sum(prompt.said(f"This is try {number}.") for number in range(len(tries)))
    done += prompt.text.count("Tool call error:\n\n<error>")
    if done < len(tries):
        return f"This is try {done}.{tries[done]}"
    return prompt.ends("All are written.")


def cut_off(good: str) -> str:
    """Says which tool it means, and ends in its arguments."""
    called = json.loads(good.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    arguments = json.dumps(called["arguments"])[:-4]
    return f'<tool_call>{{"name": "{called["name"]}", "arguments": {arguments}</tool_call>'


async def test_calls_at_once(harness: Harness, tokenizer: Path, shm: Path, tmp_path: Path) -> None:
    async with stage(tmp_path, tokenizer, shm, at_once) as job:
        run = await job.play(harness.config(), TASK, WANTED)
        kept = check_law(job, run)
    assert run.result.score == 1.0, run.log
    assert kept.paths() == 1
    assert kept.roles_count() == {"main": 2}


async def test_broken_calls(harness: Harness, tokenizer: Path, shm: Path, tmp_path: Path) -> None:
    async with stage(tmp_path, tokenizer, shm, broken) as job:
        run = await job.play(harness.config(), TASK, WANTED)
        kept = check_law(job, run)
        totals = await job.proxy.ask(GetProxyTotals())
    assert run.result.score == 1.0, run.log
    assert totals.malformed_tool_calls == 3
    # Of the calls that mini-swe-agent takes out of its history, each is the end of a path.
    assert kept.paths() == (5 if harness is MINI else 1)


async def test_an_empty_answer(harness: Harness, tokenizer: Path, shm: Path, tmp_path: Path) -> None:
    empty = 0

    def sometimes_empty(prompt: Prompt) -> str:
        nonlocal empty
        if TASK in prompt.text and prompt.tools and prompt.said("c.txt") and not empty:
            empty += 1
            return ""
        return at_once(prompt)

    async with stage(tmp_path, tokenizer, shm, sometimes_empty) as job:
        run = await job.play(harness.config(), TASK, WANTED)
        kept = check_law(job, run)
    assert run.result.score == 1.0, run.log
    # Who asks again has an answer that is of no use beside its path, who does not has it as its last.
    asks_again = harness not in (CODEX, OPENCODE)
    assert kept.paths() == 1
    assert kept.roles_count() == ({"main": 2, "auxiliary": 1} if asks_again else {"main": 2})
