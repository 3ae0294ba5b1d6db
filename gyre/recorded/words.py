"""What a recorded run looks like to people, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gyre.recorded.resample import Plan, Resampled
from gyre.recorded.rescore import Rescored
from gyre.recorded.rows import ExecutionLine, mask
from gyre.recorded.run import Fate, Recorded
from gyre.recorded.text import TokenText
from gyre.trajectory.tree import Node
from gyre.watch.inspection import duration, one_line

EXCERPT = 48
_COLUMNS = {
    "execution": 12,
    "task": 14,
    "step": 5,
    "score": 7,
    "advantage": 10,
    "sampled": 8,
    "trained": 8,
    "turns": 6,
    "compactions": 12,
    "sub-agents": 11,
    "retries": 8,
    "time": 8,
    "end": 16,
    "roles": 0,
}
_RESAMPLED = {
    "group": 9,
    "step": 5,
    "trajectories": 14,
    "trained": 17,
    "micro-steps": 12,
    "row tokens": 19,
    "tree tokens": 0,
}


def execution_head() -> str:
    return _row(_COLUMNS, *_COLUMNS)


def execution_row(line: ExecutionLine) -> str:
    return _row(
        _COLUMNS,
        line.execution,
        one_line(line.task),
        str(line.step),
        _number(line.score),
        _number(line.advantage, sign=True),
        str(line.sampled_tokens),
        "-" if line.trained_tokens is None else str(line.trained_tokens),
        str(line.turns),
        str(line.compactions),
        str(line.sub_agents),
        str(line.retries),
        "-" if line.seconds is None else duration(line.seconds),
        line.reason or "-",
        _counts(line.roles),
    )


# --- a tree -----------------------------------------------------------------------------------------


def tree_lines(found: Recorded) -> Iterator[str]:
    """An execution, its calls from the roots down (a call that alone continues another stands below it, at
    the same depth), and its draws."""
    spec, ended, counts = found.row.spec, found.row.ended, found.counts
    result = ended.result if ended else None
    end = f"{result.reason} after {duration(result.seconds)}" if result else "not over"
    about = f"{spec.execution}  {one_line(spec.task)}  {spec.split}  attempt {spec.attempt}  {end}"
    yield f"{about}  score {_number(result.score if result else None)}"
    if result and result.detail:
        yield f"  {one_line(result.detail)}"
    yield f"  {counts.calls} calls  {_counts(counts.roles)}  {counts.retries} retried"
    yield f"  {counts.sampled_tokens} sampled tokens: {_where(found)}"
    fates = found.fates()
    for node, depth in _down(found):
        yield f"{'  ' * depth}{_call(found, node, fates.get(node.call, Fate()))}"
    for index, drawn in enumerate(found.draws):
        yield (
            f"draw {index}  leaf {drawn.leaf}  {drawn.role}  trains {drawn.trainable_tokens} of"
            f" {drawn.length_tokens} tokens  weight {drawn.weight:.3f}  advantage {drawn.advantage:+.3f}"
        )


def _down(found: Recorded) -> Iterator[tuple[Node, int]]:
    """Depth first, with the count of forks above; not by recursion, a path may have thousands of calls."""
    pending = [(root, 1) for root in reversed(found.tree.roots())]
    while pending:
        node, depth = pending.pop()
        yield node, depth
        children = found.tree.children(node)
        pending += [(child, depth + (len(children) > 1)) for child in reversed(children)]


def _call(found: Recorded, node: Node, fate: Fate) -> str:
    index, roles = node.index, found.roles
    parts = [f"{index}", roles.of_node[index]]
    if index in roles.spawns:
        parts.append(f"asked for by {roles.spawns[index]}")
    if index in roles.summaries:
        parts.append(f"goes on from the summary {roles.summaries[index]}")
    parts.append(f"{len(node.tokens.token_ids) - node.sampled_tokens}+{node.sampled_tokens} tokens")
    parts.append(_versions(node))
    parts.append(str(fate) if node.sampled_tokens else "nothing sampled")
    if len(children := found.tree.children(node)) > 1:
        parts.append(f"forks into {', '.join(str(child.index) for child in children)}")
    return "  ".join([*filter(None, parts), _excerpt(node.output_message)])


def _versions(node: Node) -> str:
    versions = sorted(set(node.tokens.versions[node.tokens.sampled].tolist()))
    return f"v{','.join(map(str, versions))}" if versions else ""


def _where(found: Recorded) -> str:
    trained = "undecided" if found.ledger is None else f"{found.ledger.trained_tokens} trained"
    return ", ".join([trained, *(f"{n} {reason}" for reason, n in found.excluded_tokens.items())])


def _excerpt(message: Mapping[str, Any]) -> str:
    """What an answer says, or the tools that it calls."""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
        said = ", ".join(
            f"{function.get('name')} {function.get('arguments')}"
            for function in functions
            if isinstance(function, Mapping)
        )
    else:
        said = str(message.get("content") or "")
    said = " ".join(said.split())
    return one_line(said if len(said) <= EXCERPT else f"{said[:EXCERPT]}...")


# --- tokens -----------------------------------------------------------------------------------------

TOKEN_HEAD = f"{'position':>8}  {'id':>7}  {'log-prob':>10}  {'mask':<9}  {'version':<8}  text"


def token_fields(found: Recorded, node: Node, text: TokenText | None) -> Iterator[dict[str, Any]]:
    """Of each token of a call. `kv_version` is of the oldest weights whose KV it was sampled over."""
    fate = found.fates().get(node.call, Fate())
    begins = sum(len(above.tokens.token_ids) for above in found.tree.path(node)[:-1])
    for at, (token, sampled, logprob, version, kv_version) in enumerate(zip(*node.tokens, strict=True)):
        yield {
            "position": begins + at,
            "token": int(token),
            "text": text.of(int(token)) if text else None,
            "logprob": float(logprob) if sampled else None,
            "mask": mask(bool(sampled), fate),
            "reason": fate.reason if sampled else None,
            "draw": fate.draw if sampled else None,
            "version": int(version) if sampled else None,
            "kv_version": int(kv_version) if sampled else None,
        }


def token_row(fields: Mapping[str, Any]) -> str:
    logprob = "" if fields["logprob"] is None else f"{fields['logprob']:.4g}"
    version = "" if fields["version"] is None else str(fields["version"])
    if fields["kv_version"] != fields["version"]:
        version += f" over {fields['kv_version']}"
    text = "" if fields["text"] is None else repr(fields["text"])
    number = f"{fields['position']:>8}  {fields['token']:>7}  {logprob:>10}"
    return f"{number}  {fields['mask']:<9}  {version:<8}  {text}".rstrip()


# --- sampled again ----------------------------------------------------------------------------------


def resampled_head() -> str:
    return _row(_RESAMPLED, *_RESAMPLED)


def resampled_row(one: Resampled) -> str:
    return _compared(one.group, str(one.step), one.was, one.would_be)


def resampled_total(was: Plan, would_be: Plan) -> Iterator[str]:
    yield _compared("all", "", was, would_be)
    for name, plan in (("was", was), ("would be", would_be)):
        roles = _counts(plan.roles) or "none"
        excluded = _counts(plan.excluded_tokens) or "none"
        yield f"{name}: trajectories by role: {roles}; tokens not trained: {excluded}"


def _compared(group: str, step: str, was: Plan, would_be: Plan) -> str:
    pairs = [
        (was.trajectories, would_be.trajectories),
        (was.trained_tokens, would_be.trained_tokens),
        (was.micro_steps, would_be.micro_steps),
        (was.row_tokens, would_be.row_tokens),
        (was.tree_tokens, would_be.tree_tokens),
    ]
    return _row(_RESAMPLED, group, step, *(f"{a} -> {b}" if a != b else str(a) for a, b in pairs))


# --- scored again -----------------------------------------------------------------------------------

_RESCORED = {"execution": 12, "task": 14, "was": 7, "score": 7, "detail": 0}


def rescored_head() -> str:
    return _row(_RESCORED, *_RESCORED)


def rescored_row(one: Rescored) -> str:
    numbers = _number(one.was), _number(one.score)
    return _row(_RESCORED, one.execution, one_line(one.task), *numbers, one_line(one.detail))


# --- words ------------------------------------------------------------------------------------------


def _row(columns: Mapping[str, int], *values: str) -> str:
    cells = zip(values, columns.values(), strict=True)
    return " ".join(f"{value:<{width - 1 if width else 0}}" for value, width in cells).rstrip()


def _number(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.3f}" if sign else f"{value:.4g}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
