"""What makes a tree of an execution: a context that is compacted, sub-agents at the same time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gyre.harness.presets import PRESETS
from tests.real_harnesses.commands import CLAUDE_CODE, CODEX, OPENCODE, QWEN_CODE, Harness
from tests.real_harnesses.law import check_law
from tests.real_harnesses.policy import Prompt, call
from tests.real_harnesses.stage import stage

pytestmark = pytest.mark.timeout(500)

TASK = "Write the colours red and blue to red.txt and blue.txt."
WANTED = {"red.txt": "red\n", "blue.txt": "blue\n"}
# mini-swe-agent has neither.
HARNESSES = (CLAUDE_CODE, CODEX, QWEN_CODE, OPENCODE)
every_harness = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)

SUMMARY = "Checkpoint seven: red.txt is written, the other file is left to do."
SUMMARISES = tuple(word for preset in PRESETS.values() for word in preset.summarises)
# How much longer than its first prompt a context gets before it is compacted, and what a step adds to it.
GROWS_TOKENS = 9000
LINES = 1000


def asks_for_summary(prompt: Prompt) -> bool:
    asking = [*prompt.turns[:1], *prompt.turns[-1:]]
    return any(word in turn.text for turn in asking for word in SUMMARISES)


def compacting(prompt: Prompt) -> str:
    """Reads a lot until it is asked for a summary; ends with what that says."""
    if asks_for_summary(prompt):
        return f"<analysis>It went well.</analysis>\n<summary>\n{SUMMARY}\n</summary>"
    if SUMMARY in prompt.text:
        return (
            prompt.ends("Both are written.")
            if prompt.said("> blue.txt")
            else prompt.runs("echo blue > blue.txt")
        )
    steps = prompt.text.count("seq 1 ")
    if steps == 0:
        return f"I begin. {prompt.runs(f'echo red > red.txt; seq 1 {LINES}')}"
    return prompt.runs(f"seq 1 {LINES + steps}") if steps < 12 else prompt.ends("I never got a summary.")


@every_harness
async def test_a_context_is_compacted(harness: Harness, tokenizer: Path, shm: Path, tmp_path: Path) -> None:
    async with stage(tmp_path, tokenizer, shm, compacting) as job:
        limit = harness.prompt_tokens + GROWS_TOKENS
        run = await job.play(harness.config(compact_tokens=limit), TASK, WANTED)
        kept = check_law(job, run)
    assert run.result.score == 1.0, run.log
    assert set(kept.roles_count()) == {"main", "main_summary"}
    assert kept.roles_count()["main_summary"] == 1
    (root,) = kept.roles.summaries
    assert SUMMARY in str(kept.tree.nodes[root].messages)
    # Before and after.
    assert len([node for node in kept.tree.roots() if kept.roles.of_node[node.index] == "main"]) == 2


def subtask(colour: str) -> str:
    return f"Write the word {colour} to the file {colour}.txt, nothing else."


_SPAWNS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "Agent": lambda prompt: {
        "description": "colour", "subagent_type": "general-purpose", "prompt": prompt,
        "run_in_background": False,
    },
    "agent": lambda prompt: {
        "description": "colour", "subagent_type": "general-purpose", "prompt": prompt
    },
    "task": lambda prompt: {"description": "colour", "subagent_type": "general", "prompt": prompt},
    "spawn_agent": lambda prompt: {"message": prompt},
}  # fmt: skip


def delegating(prompt: Prompt) -> str:
    """Two sub-agents, each with a file to write."""
    asked = [turn.text for turn in prompt.turns if turn.role == "user"]
    if not any(TASK in text for text in asked):
        colour = next(colour for colour in ("red", "blue") if any(subtask(colour) in text for text in asked))
        if not prompt.said(f"> {colour}.txt"):
            return f"<think>{colour}.</think>{prompt.runs(f'echo {colour} > {colour}.txt')}"
        return f"The file {colour}.txt is there now."
    if not prompt.said(subtask("blue")):
        name = next(name for name in _SPAWNS if name in prompt.tools)
        calls = [call(name, _SPAWNS[name](subtask(colour))) for colour in ("red", "blue")]
        return f"I have them do it.{''.join(calls)}"
    agents = re.findall(r'"agent_id":\s*"([^"]+)"', "".join(prompt.results))
    if "wait_agent" in prompt.tools and not all("is there now" in prompt.text for _ in agents):
        return call("wait_agent", {"targets": agents, "timeout_ms": 60_000})
    return prompt.ends("Both are written.")


@every_harness
async def test_sub_agents_at_the_same_time(
    harness: Harness, tokenizer: Path, shm: Path, tmp_path: Path
) -> None:
    async with stage(tmp_path, tokenizer, shm, delegating) as job:
        run = await job.play(harness.config(), TASK, WANTED)
        kept = check_law(job, run)
    assert run.result.score == 1.0, run.log
    assert set(kept.roles_count()) == {"main", "sub_agent"}
    assert len(kept.roles.spawns) == 2
    assert kept.paths() == 1
    assert kept.paths("sub_agent") == 2
