"""Roles of an execution's calls, proven by what the calls say.

A new root (a prompt that extends no recorded path) is one of three things:
- a sub-agent: a user text in it equals a string argument of a tool call that was sampled earlier;
- a continuation after compaction: the text of an earlier call, the summary, reappears inside a user message
  of it (or as an assistant message, which counts where no user message holds a summary);
- else the main agent, as the first root is.
A segment is a root with all that extends it; a continuation has the kind of the segment that its summary
belongs to.

Auxiliary is what the agent's work goes on without: a title or probe asked for beside it, and an answer
without content to a prompt that was asked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from gyre.trajectory.records import Role
from gyre.trajectory.tree import Node, TrajectoryTree

Kind = Literal["main", "sub_agent"]
Said = tuple[str, str]

# An answer to a request that offered tools is taken for a summary only from this length on: a short one
# ("done") is found in later prompts by chance.
MIN_SUMMARY_CHARS = 16
# A shorter argument ("continue", "git status") is some user's text by chance.
MIN_PROMPT_CHARS = 12
# A user text from this length on may stand inside another text; a shorter one is equal to it.
MIN_QUOTED_CHARS = 16

_SUMMARY: dict[Kind, Role] = {"main": "main_summary", "sub_agent": "sub_agent_summary"}


class Roles(msgspec.Struct, frozen=True, kw_only=True):
    """`of_node` has one role per node of the tree, by index. `summaries` maps a continuation's root to the
    call that it continues from, `spawns` a sub-agent's root to the call that asked for it."""

    of_node: tuple[Role, ...]
    summaries: dict[int, int]
    spawns: dict[int, int]


class ExecutionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What an execution's tree consists of. `turns` are the calls of the main agent, `tool_calls` the
    well-formed ones."""

    calls: int = 0
    sampled_tokens: int = 0
    turns: int = 0
    roles: dict[str, int] = {}
    compactions: int = 0
    sub_agents: int = 0
    retries: int = 0
    tool_calls: int = 0
    malformed_tool_calls: int = 0


def classify(tree: TrajectoryTree) -> Roles:
    """A pure function of the tree's content and the order of its calls."""
    kinds: list[Kind] = []
    summaries: dict[int, int] = {}
    spawns: dict[int, int] = {}
    asides = _asides(tree)
    for node in tree.nodes:
        earlier = tree.nodes[: node.index]
        if node.parent is not None:
            kinds.append(kinds[node.parent])
        elif (spawn := _spawn(node, earlier)) is not None:
            kinds.append("sub_agent")
            spawns[node.index] = spawn.index
        elif (summary := _summary(node, [its for its in earlier if its.index not in asides])) is not None:
            kinds.append(kinds[summary.index])
            summaries[node.index] = summary.index
        else:
            kinds.append("main")
    roles: list[Role] = list(kinds)
    for index in summaries.values():
        roles[index] = _SUMMARY[kinds[index]]
    for index in asides - spawns.keys() - summaries.keys() | _asked_again(tree, spawns):
        roles[index] = "auxiliary"
    return Roles(of_node=tuple(roles), summaries=summaries, spawns=spawns)


def count(tree: TrajectoryTree, roles: Roles, retries: int) -> ExecutionCounts:
    return ExecutionCounts(
        calls=len(tree.nodes),
        sampled_tokens=tree.sampled_tokens,
        turns=roles.of_node.count("main"),
        roles=dict(Counter(roles.of_node)),
        compactions=len(set(roles.summaries.values())),
        sub_agents=len(roles.spawns),
        retries=retries,
        tool_calls=sum(node.parsed_tool_calls for node in tree.nodes),
        malformed_tool_calls=sum(node.malformed_tool_calls for node in tree.nodes),
    )


def _spawn(root: Node, earlier: Sequence[Node]) -> Node | None:
    stripped = (text.strip() for text in _texts(root.messages, "user"))
    texts = {text for text in stripped if len(text) >= MIN_PROMPT_CHARS}
    for node in reversed(earlier):
        if any(argument.strip() in texts for argument in _string_arguments(node.output_message)):
            return node
    return None


def _summary(root: Node, earlier: Sequence[Node]) -> Node | None:
    """The longest summary that reappears; of equal ones the latest."""
    candidates = [(text, node) for node in reversed(earlier) for text in _summary_texts(node)]
    user_texts = list(_texts(root.messages, "user"))
    found = [(text, node) for text, node in candidates if any(text in user for user in user_texts)]
    if not found:
        assistant_texts = {text.strip() for text in _texts(root.messages, "assistant")}
        found = [(text, node) for text, node in candidates if text in assistant_texts]
    return max(found, key=lambda pair: len(pair[0]))[1] if found else None


def _summary_texts(node: Node) -> Iterator[str]:
    """The answer's text where it can be a summary, and what its tags say is the summary: Claude Code has an
    analysis written before it, and goes on without that."""
    message = node.output_message
    if message.get("tool_calls"):
        return
    text = _text(message)
    tagged = text.partition("<summary>")[2].partition("</summary>")[0].strip()
    shortest = MIN_SUMMARY_CHARS if node.has_tools else 1
    for part in (text, tagged):
        if len(part) >= shortest:
            yield part


def _asides(tree: TrajectoryTree) -> set[int]:
    """Roots without tools, history and sequel, which hold a user text that an agent begins with, and whose
    answers no later call holds: unlike a summary's, nothing was made of them."""
    begins = {
        node.index: {text.strip() for text in _texts(node.messages, "user")} - {""}
        for node in tree.roots()
        if node.has_tools
    }
    found = set()
    for root in tree.roots():
        if root.has_tools or tree.children(root) or any(_texts(root.messages, "assistant")):
            continue
        asked = [text.strip() for text in _texts(root.messages, "user")]
        if any(_holds(asked, text) for texts in begins.values() for text in texts):
            later = tree.nodes[root.index + 1 :]
            if not any(_is_used(answer, asked, later) for answer in _summary_texts(root)):
                found.add(root.index)
    return found


def _holds(texts: Sequence[str], text: str) -> bool:
    return text in texts or (len(text) >= MIN_QUOTED_CHARS and any(text in other for other in texts))


def _is_used(answer: str, asked: Sequence[str], later: Sequence[Node]) -> bool:
    """Whether later calls hold an answer, unless it repeats what was asked: others say that too."""
    if len(answer) < MIN_SUMMARY_CHARS or any(answer in text for text in asked):
        return False
    return any(answer in text for node in later for _, text in _said(node.messages))


def _asked_again(tree: TrajectoryTree, spawns: Mapping[int, int]) -> set[int]:
    """Calls whose answers have no content, which a later call asks again, be it with a user text more."""
    found = set()
    for index, node in enumerate(tree.nodes):
        if tree.children(node) or node.output_message.get("tool_calls") or _text(node.output_message):
            continue
        if not (asked := list(_said(node.messages))):
            continue
        siblings = tree.roots() if node.parent is None else tree.children(tree.nodes[node.parent])
        for other in siblings:
            if other.index > index and other.has_tools == node.has_tools:
                again = list(_said(other.messages))
                more = again[len(asked) :]
                # Two sub-agents may be given the same to do.
                is_twin = not more and index in spawns
                if again[: len(asked)] == asked and not is_twin and all(role == "user" for role, _ in more):
                    found.add(index)
                    break
    return found


def _text(message: Mapping[str, Any]) -> str:
    return "\n".join(_texts([message], "assistant")).strip()


def _said(messages: Iterable[Mapping[str, Any]]) -> Iterator[Said]:
    """Roles and texts of messages, block by block."""
    for message in messages:
        if isinstance(role := message.get("role"), str):
            for text in _texts([message], role):
                yield role, text


def _texts(messages: Iterable[Mapping[str, Any]], role: str) -> Iterator[str]:
    """Text contents of the messages of a role; of a list of blocks, each block's."""
    for message in messages:
        if message.get("role") != role:
            continue
        content = message.get("content")
        blocks = content if isinstance(content, list) else [content]
        for block in blocks:
            text = block.get("text") if isinstance(block, Mapping) else block
            if isinstance(text, str):
                yield text


def _string_arguments(message: Mapping[str, Any]) -> Iterator[str]:
    """All strings among the arguments of a message's tool calls; arguments that are no JSON have none."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments)
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
                continue
        yield from _strings(arguments)


def _strings(value: object) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
