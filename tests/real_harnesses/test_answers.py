"""Answers that are not plain: several tool calls at once, broken ones, empty ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_harnesses.commands import Harness
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
    """What no harness can run, then what it can."""
    if TASK not in prompt.text or not prompt.tools:
        return "Numbers in files"
    if not prompt.said("first try"):
        return f"A first try.{call('no_such_tool', {'path': 'a.txt'})}"
    if not prompt.said("second try"):
        return f"A second try.{prompt.runs(COMMANDS[0]).replace('command', 'order').replace('cmd', 'order')}"
    if not prompt.said("third try"):
        return f'A third try.{prompt.runs(COMMANDS[0])}<tool_call>{{"name": </tool_call>'
    if not prompt.said("a.txt b.txt"):
        return "\n".join(map(prompt.runs, COMMANDS)) + prompt.runs("ls a.txt b.txt c.txt")
    if not prompt.said("fourth try"):
        return f"A fourth try.{prompt.runs('ls')[:-18]}</tool_call>"
    return prompt.ends("All are written.")


async def test_calls_at_once(harness: Harness, tokenizer: Path, shm: Path, tmp_path: Path) -> None:
    async with stage(tmp_path, tokenizer, shm, at_once) as job:
        run = await job.play(harness.config(), TASK, WANTED)
        kept = check_law(job, run)
    print(kept.show())
    assert run.result.score == 1.0, run.log
    assert kept.paths() == 1
    assert kept.roles_count().pop("auxiliary", 0) == 0
    assert kept.roles_count()["main"] == 2


async def test_broken_calls(harness: Harness, tokenizer: Path, shm: Path, tmp_path: Path) -> None:
    async with stage(tmp_path, tokenizer, shm, broken) as job:
        run = await job.play(harness.config(), TASK, WANTED)
        kept = check_law(job, run)
    print(kept.show())
    print(run.log[-1500:])
    assert run.result.score == 1.0, run.log


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
    print(kept.show())
    print(run.log[-1500:])
    assert run.result.score == 1.0, run.log
