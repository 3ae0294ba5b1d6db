"""Call records and random trees for tests of the trajectory room."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from gyre.trajectory.records import CallRecord, ExecutionResult, ExecutionSpec
from gyre.trajectory.tree import TrajectoryTree


def record(
    call: str,
    parent: str | None = None,
    *,
    new: Sequence[int] = (1, 2),
    out: Sequence[int] = (3,),
    execution: str = "g000000.00",
    version: int = 0,
    messages: Sequence[dict[str, Any]] = (),
    output: dict[str, Any] | None = None,
    has_tools: bool = True,
    finish_reason: str = "stop",
    moved_at: tuple[int, ...] = (),
    parsed_tool_calls: int = 0,
    malformed_tool_calls: int = 0,
) -> CallRecord:
    return CallRecord(
        execution=execution,
        call=call,
        parent=parent,
        new_input_ids=tuple(new),
        output_ids=tuple(out),
        logprobs=tuple(-0.5 * (position + 1) for position in range(len(out))),
        versions=(version,) * len(out),
        finish_reason=finish_reason,
        moved_at=moved_at,
        parsed_tool_calls=parsed_tool_calls,
        malformed_tool_calls=malformed_tool_calls,
        messages=tuple(messages),
        output_message=output or says(""),
        has_tools=has_tools,
        tool_calls={},
        started_s=1.0,
        finished_s=2.0,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls_tool(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "t1", "type": "function", "function": function}],
    }


def tree_of(*records: CallRecord) -> TrajectoryTree:
    tree = TrajectoryTree(records[0].execution if records else "g000000.00")
    for item in records:
        tree.add(item)
    return tree


def spec(
    execution: str = "g000000.00",
    *,
    attempt: int = 1,
    group_executions: int = 2,
    step: int = 0,
    version: int = 0,
    refill: int = 0,
) -> ExecutionSpec:
    group, index = execution.split(".")
    return ExecutionSpec(
        execution=execution,
        group=group,
        task="task-0",
        split="eval" if group[0] == "e" else "train",
        index=int(index),
        attempt=attempt,
        version_dispatched=version,
        group_executions=group_executions,
        step=step,
        refill=refill,
    )


def result(execution: str, score: float | None, reason: str = "completed") -> ExecutionResult:
    return ExecutionResult(execution=execution, reason=reason, score=score, seconds=1.5)  # type: ignore[arg-type]


@st.composite
def random_records(draw: st.DrawFn, execution: str = "g000000.00", max_calls: int = 12) -> list[CallRecord]:
    """Calls of a random forest, with compactions and sub-agents in it, so that all four roles come up."""
    records: list[CallRecord] = []
    for index in range(draw(st.integers(1, max_calls))):
        parent = draw(st.none() | st.sampled_from(records)) if records else None
        messages: list[dict[str, Any]] = [user(f"free text {index}")]
        if parent is None and records:
            origin = draw(st.sampled_from(records))
            content = origin.output_message["content"]
            messages = [
                user(f"do the work of {origin.call}" if content is None else f"So far: {content}. Go on.")
            ]
        answers = st.sampled_from(
            [
                says(f"a summary of some length {index}."),
                calls_tool("spawn", prompt=f"do the work of c{index:02d}"),
            ]
        )
        records.append(
            record(
                f"c{index:02d}",
                parent.call if parent else None,
                new=draw(st.lists(st.integers(0, 9), max_size=5)),
                out=draw(st.lists(st.integers(10, 19), max_size=6)),
                execution=execution,
                version=index,
                messages=messages,
                output=draw(answers),
            )
        )
    return records
