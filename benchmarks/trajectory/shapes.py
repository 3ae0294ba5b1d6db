"""The shapes of trees whose sharing is measured. Each execution has lengths of its own, around the shape's;
the executions of a group have one prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.trajectory.executions import Harness
from gyre.trajectory import CallRecord

Shape = Callable[[Harness, tuple[int, ...], np.random.Generator], Iterator[CallRecord]]


def around(random: np.random.Generator, count: int) -> int:
    """Within a half of it."""
    return max(1, int(count * random.uniform(0.5, 1.5)))


def _trunk(
    harness: Harness, prompt: tuple[int, ...], random: np.random.Generator, turns: int, forks: int, fork: int
) -> Iterator[CallRecord]:
    turns = around(random, turns)
    forked = set(np.linspace(turns // forks, turns - 1, forks).astype(int).tolist())
    parent = None
    for turn in range(turns):
        record = harness.call(parent, prompt if parent is None else 64, 64)
        yield record
        parent = record.call
        if turn in forked:
            yield harness.call(parent, fork // 2, around(random, fork // 2))


def trunk(harness: Harness, prompt: tuple[int, ...], random: np.random.Generator) -> Iterator[CallRecord]:
    """30 turns of 128 tokens, 5 forks of 512."""
    yield from _trunk(harness, prompt, random, turns=30, forks=5, fork=512)


def deep(harness: Harness, prompt: tuple[int, ...], random: np.random.Generator) -> Iterator[CallRecord]:
    """110 turns of 128 tokens, 8 forks of 1024."""
    yield from _trunk(harness, prompt, random, turns=110, forks=8, fork=1024)


def answers(harness: Harness, prompt: tuple[int, ...], random: np.random.Generator) -> Iterator[CallRecord]:
    """One answer of 512 tokens: the tree is the group's."""
    yield harness.call(None, prompt, around(random, 512))


def compactions(
    harness: Harness, prompt: tuple[int, ...], random: np.random.Generator
) -> Iterator[CallRecord]:
    """6 contexts of 1756 tokens that begin alike."""
    for _ in range(6):
        yield harness.call(None, prompt[: len(prompt) // 2] + harness.tokens(878), around(random, 878))


def thinking(harness: Harness, prompt: tuple[int, ...], random: np.random.Generator) -> Iterator[CallRecord]:
    """20 turns of 96 tokens, each with thoughts of 64 that the next does not see."""
    parent = None
    for turn in range(around(random, 20)):
        record = harness.call(parent, prompt if turn == 0 else 48, 48)
        yield record
        parent = record.call
        yield harness.call(parent, 1, around(random, 64))


SHAPES: dict[str, Shape] = {
    "trunk": trunk,
    "answers": answers,
    "compactions": compactions,
    "thinking": thinking,
    "deep": deep,
}
