"""The trajectory tree of one execution: its calls, merged by shared token prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gyre.trajectory.records import UNFINISHED, CallRecord

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


class TreeError(ValueError):
    """A record that does not fit its execution's tree."""

    def __init__(self, execution: str, call: str, reason: str) -> None:
        super().__init__(f"execution {execution}, call {call}: {reason}")
        self.execution = execution
        self.call = call
        self.reason = reason


class Tokens(NamedTuple):
    """A run of tokens, one entry each: `sampled` by the policy or context; `logprobs` are 0, `versions` and
    `kv_versions` -1 where not sampled. Of one call the last two are one array where they are the same."""

    token_ids: Int32s
    sampled: Bools
    logprobs: Float32s
    versions: Int32s
    kv_versions: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One call. `tokens` are its own (new prompt content, then what was sampled); its path is its parent's
    path and these. `index` counts calls in the order they were recorded."""

    index: int
    call: str
    parent: int | None
    tokens: Tokens
    sampled_tokens: int
    messages: tuple[dict[str, Any], ...]
    output_message: dict[str, Any]
    has_tools: bool
    parsed_tool_calls: int
    malformed_tool_calls: int


class TrajectoryTree:
    """Calls in the order they were recorded. A forest: a prompt that extends no path is a new root. Calls
    that nobody was answered are no part of it: `unfinished` has their sampled tokens, by call. `undelivered`
    are tokens of calls that no record has; `ends` the positions in its output at which a call's stays at
    engines were over."""

    def __init__(self, execution: str) -> None:
        self.execution = execution
        self.nodes: list[Node] = []
        self.unfinished: dict[str, int] = {}
        self.undelivered: dict[str, int] = {}
        self.ends: dict[str, tuple[int, ...]] = {}
        self._children: list[list[int]] = []
        self._index: dict[str, int] = {}

    def add(self, record: CallRecord) -> bool:
        """Hangs a call on its parent; False when the very same call is there already. Raises TreeError for
        an unknown parent, arrays of unequal length, a log-probability that is not finite, a call id that is
        taken by another call."""
        if record.execution != self.execution:
            raise TreeError(self.execution, record.call, f"the record is of execution {record.execution}")
        tokens = self._tokens(record)
        parent = None
        if record.parent is not None:
            parent = self._index.get(record.parent)
            if parent is None:
                raise TreeError(self.execution, record.call, f"its parent {record.parent} is not recorded")
        self.ends.setdefault(record.call, (*record.moved_at, len(record.output_ids)))
        if record.finish_reason == UNFINISHED:
            is_new = record.call not in self.unfinished
            self.unfinished[record.call] = len(record.output_ids)
            return is_new
        if (known := self._index.get(record.call)) is not None:
            self._check_same(self.nodes[known], parent, tokens, record)
            return False
        index = len(self.nodes)
        node = Node(
            index=index,
            call=record.call,
            parent=parent,
            tokens=tokens,
            sampled_tokens=len(record.output_ids),
            messages=record.messages,
            output_message=record.output_message,
            has_tools=record.has_tools,
            parsed_tool_calls=record.parsed_tool_calls,
            malformed_tool_calls=record.malformed_tool_calls,
        )
        self.nodes.append(node)
        self._children.append([])
        self._index[record.call] = index
        if parent is not None:
            self._children[parent].append(index)
        return True

    def roots(self) -> list[Node]:
        return [node for node in self.nodes if node.parent is None]

    def children(self, node: Node) -> list[Node]:
        """More than one: the context forked after this call."""
        return [self.nodes[index] for index in self._children[node.index]]

    def leaves(self) -> list[Node]:
        """Calls that none continues, in the order they were recorded."""
        return [node for node in self.nodes if not self._children[node.index]]

    def path(self, node: Node) -> list[Node]:
        """From the root to `node`."""
        path = [node]
        while (parent := path[-1].parent) is not None:
            path.append(self.nodes[parent])
        path.reverse()
        return path

    def path_tokens(self, node: Node) -> Tokens:
        """The whole path: prompt and output of `node`."""
        parts = [step.tokens for step in self.path(node)]
        return Tokens(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    @property
    def sampled_tokens(self) -> int:
        """In records or not, of unfinished calls too."""
        others = sum(self.unfinished.values()) + sum(self.undelivered.values())
        return sum(node.sampled_tokens for node in self.nodes) + others

    def _tokens(self, record: CallRecord) -> Tokens:
        sampled = len(record.output_ids)
        kv_versions = record.kv_versions or record.versions
        if not len(record.logprobs) == len(record.versions) == len(kv_versions) == sampled:
            raise TreeError(
                self.execution,
                record.call,
                f"{sampled} sampled tokens with {len(record.logprobs)} log-probabilities,"
                f" {len(record.versions)} versions and {len(kv_versions)} of KV",
            )
        logprobs = np.array(record.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            raise TreeError(self.execution, record.call, "a log-probability is not finite")
        context = len(record.new_input_ids)
        versions = _after(context, record.versions)
        return Tokens(
            token_ids=np.array(record.new_input_ids + record.output_ids, np.int32),
            sampled=np.repeat([False, True], [context, sampled]),
            logprobs=np.concatenate([np.zeros(context, np.float32), logprobs]),
            versions=versions,
            kv_versions=versions if kv_versions == record.versions else _after(context, kv_versions),
        )

    def _check_same(self, node: Node, parent: int | None, tokens: Tokens, record: CallRecord) -> None:
        same = node.parent == parent and all(
            np.array_equal(ours, theirs) for ours, theirs in zip(node.tokens, tokens, strict=True)
        )
        if not same:
            raise TreeError(self.execution, record.call, "recorded already with other content")


def _after(context: int, versions: tuple[int, ...]) -> Int32s:
    return np.concatenate([np.full(context, -1, np.int32), np.array(versions, np.int32)])
