"""A plain task."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_harnesses.commands import Harness
from tests.real_harnesses.law import check_law
from tests.real_harnesses.policy import Prompt
from tests.real_harnesses.stage import stage

pytestmark = pytest.mark.timeout(500)

TASK = "Write the numbers one and two to a.txt and b.txt, then join them in c.txt."
# The networks that there are: a loopback and nothing else.
NETWORKS = "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' > net.txt"
WANTED = {"a.txt": "one\n", "b.txt": "two\n", "c.txt": "one\ntwo\n", "net.txt": "lo\n"}


def plain(prompt: Prompt) -> str:
    """One step after another, each with what came of the last."""
    if TASK not in prompt.text or not prompt.tools:
        return "Numbers in files"
    if not prompt.said("a.txt"):
        return f"<think>\nFirst one.\n</think>\n\nI begin. {prompt.runs('echo one > a.txt')}"
    if not prompt.said("b.txt"):
        return f"<think>Then two.</think>{prompt.runs('echo two > b.txt')}"
    if not prompt.said("c.txt"):
        return f"I join them.\n\n{prompt.runs(f'cat a.txt b.txt > c.txt; {NETWORKS}')}"
    return prompt.ends("<think>That is all.</think>  All is done.\n")


async def test_a_plain_task_is_one_path(harness: Harness, tokenizer: Path, shm: Path, tmp_path: Path) -> None:
    async with stage(tmp_path, tokenizer, shm, plain) as job:
        run = await job.play(harness.config(), TASK, WANTED)
        assert run.result.score == 1.0, run.log
        assert run.result.reason == "completed", run.log
        kept = check_law(job, run)
    assert kept.paths() == 1
    assert kept.roles_count() == {"main": 4}
