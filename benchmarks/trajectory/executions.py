"""Executions as a harness leaves them: their calls, as they are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import json

from gyre.trajectory import CallRecord

VOCABULARY = 32_000
CHARS_PER_TOKEN = 4


class Harness:
    """Makes up the calls of one execution. Prompts and answers are of random tokens, messages of as much
    text as that would be."""

    def __init__(self, execution: str, seed: int, calls: int = 0) -> None:
        self._execution = execution
        self._random = np.random.default_rng(seed)
        self._calls = calls

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(VOCABULARY, size=count).tolist())

    def call(
        self,
        parent: str | None,
        new: int | tuple[int, ...],
        out: int,
        *,
        says: str | None = None,
        hears: str | None = None,
        spawns: str | None = None,
    ) -> CallRecord:
        """The next call: `new` are tokens of its prompt, or how many, `out` how many it samples."""
        self._calls += 1
        ids = self.tokens(new) if isinstance(new, int) else new
        asked = hears if hears is not None else f"{self._calls} " + "x" * (CHARS_PER_TOKEN * len(ids))
        answer: dict[str, Any] = {"role": "assistant", "content": says or f"answer {self._calls}"}
        if spawns is not None:
            arguments = json.encode({"prompt": spawns}).decode()
            called = {"id": "t", "type": "function", "function": {"name": "task", "arguments": arguments}}
            answer["tool_calls"] = [called]
        return CallRecord(
            execution=self._execution,
            call=f"c{self._calls:06d}",
            parent=parent,
            new_input_ids=ids,
            output_ids=self.tokens(out),
            logprobs=tuple((-self._random.random(out)).tolist()),
            versions=(0,) * out,
            finish_reason="stop",
            messages=({"role": "user", "content": asked},),
            output_message=answer,
            has_tools=says is None,
            tool_calls={},
            started_s=0.0,
            finished_s=1.0,
        )


def line(execution: str, calls: int, tokens: int) -> Iterator[CallRecord]:
    """One context that grows to the end; a quarter of it is sampled."""
    harness = Harness(execution, seed=1)
    parent = None
    for _ in range(calls):
        record = harness.call(parent, tokens // calls * 3 // 4, tokens // calls // 4)
        yield record
        parent = record.call


def retries(execution: str, calls: int, tokens: int) -> Iterator[CallRecord]:
    """The same, but the last call is answered five times: five trajectories as long as all of it."""
    *first, last = line(execution, calls - 4, tokens // calls * (calls - 4))
    yield from first
    yield last
    harness = Harness(execution, seed=3, calls=calls - 4)
    for _ in range(4):
        yield harness.call(last.parent, tokens // calls * 3 // 4, tokens // calls // 4)


def agent(execution: str, calls: int, tokens: int) -> Iterator[CallRecord]:
    """As an agent works: it compacts its context after 40 calls, every tenth call asks a sub-agent for four,
    and every eighth is answered twice, of which the harness goes on from the second answer."""
    harness = Harness(execution, seed=2)
    new, out = tokens // calls * 3 // 4, tokens // calls // 4
    made, parent, hears, turn = 0, None, None, 0

    def call(*arguments: Any, **options: Any) -> CallRecord:
        nonlocal made
        made += 1
        return harness.call(*arguments, **options)

    while made < calls:
        turn += 1
        prompt = f"do part {made} of it" if turn % 10 == 0 else None
        record = call(parent, new, out, hears=hears, spawns=prompt)
        hears = None
        yield record
        if prompt is not None:
            below = None
            for step in range(min(4, calls - made)):
                at = call(below, new, out, hears=prompt if step == 0 else None)
                yield at
                below = at.call
        if turn % 8 == 0 and made < calls:
            record = call(parent, new, out)
            yield record
        parent = record.call
        if turn % 40 == 0 and made < calls:
            summary = f"what was done until call {made} is a long story"
            yield call(parent, new, out, says=summary)
            parent, hears = None, f"This was so: {summary}. Go on."
