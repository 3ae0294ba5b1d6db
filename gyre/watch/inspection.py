"""What an inspection and a trace look like to people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from rich.text import Text
from rich.tree import Tree

from gyre.actors.looking import ActorReport, HandlerReport, NodeReport, Traced

LONGEST = 160
DEAD_LETTERS = 5

_STYLES = {"unanswered": "bold red", "ended": "red", "restarting": "yellow", "stopping": "yellow"}


class Line(NamedTuple):
    """One line of a report: `what` of it comes first, then the rest."""

    what: str
    rest: str
    style: str


def with_rates(report: ActorReport, before: ActorReport, elapsed_s: float) -> ActorReport:
    """The same with the rates of its handlers since an earlier look."""
    then = {one.message: one.count for one in before.handlers}
    same = report.incarnation == before.incarnation
    children = {child.path: child for child in before.children}
    return msgspec.structs.replace(
        report,
        handlers=tuple(
            msgspec.structs.replace(
                one, rate_per_s=max(0, one.count - (then.get(one.message, 0) if same else 0)) / elapsed_s
            )
            for one in report.handlers
        ),
        children=tuple(
            with_rates(child, children[child.path], elapsed_s) if child.path in children else child
            for child in report.children
        ),
    )


def plain(report: ActorReport) -> Iterator[str]:
    """Line by line, two spaces a level."""
    yield from _plain(report, "")


def _plain(report: ActorReport, indent: str) -> Iterator[str]:
    head, *about = _lines(report)
    yield f"{indent}{head.what}  {head.rest}".rstrip()
    for line in about:
        yield f"{indent}    {line.what}  {line.rest}".rstrip()
    for child in report.children:
        yield from _plain(child, f"{indent}  ")
    if report.hidden:
        yield f"{indent}  ... and {report.hidden} more"


def tree(report: ActorReport) -> Tree:
    """For a terminal."""
    head, *about = _lines(report)
    label = Text.assemble((head.what, head.style), "  ", head.rest)
    for line in about:
        label.append("\n  ").append(line.what, line.style).append(f"  {line.rest}")
    branch = Tree(label, guide_style="dim")
    for child in report.children:
        branch.children.append(tree(child))
    if report.hidden:
        branch.add(Text(f"... and {report.hidden} more", "dim"))
    return branch


def _lines(report: ActorReport) -> Iterator[Line]:
    """The actor in one line, then what there is to say of it."""
    name = report.path.rpartition("/")[2] or (report.node.name if report.node is not None else "")
    yield Line(name, "  ".join(_head(report)), _STYLES.get(report.state, "bold green"))
    if report.node is not None:
        yield from _node(report.node)
    if report.summary:
        yield Line("state", _fields(report.summary), "cyan")
    for handling in report.handling:
        since = "" if handling.for_s is None else f"for {duration(handling.for_s)}"
        yield Line("handling", f"{_short_name(handling.message)} {since}".rstrip(), "yellow")
    for handler in report.handlers:
        yield Line(_short_name(handler.message), _handler(handler), "dim")
    if report.last_error is not None:
        last = report.last_error
        on = f" on {_short_name(last.message)}" if last.message else ", the end of the life before"
        yield Line("last error", f"{one_line(last.error)} ({duration(last.ago_s)} ago{on})", "red")


def _head(report: ActorReport) -> Iterator[str]:
    if report.kind != "node":
        yield _short_name(report.kind)
    if report.state != "running":
        yield f"{report.state.upper()}{f': {one_line(report.why)}' if report.why else ''}"
    if report.capacity:
        yield f"mailbox {report.waiting}/{report.capacity}"
    if report.writers:
        yield f"senders that wait for room: {report.writers}"
    if report.restarts:
        yield f"{report.restarts} restart{'s' * (report.restarts != 1)}"


def _node(node: NodeReport) -> Iterator[Line]:
    peers = f"  peers {', '.join(node.peers)}" if node.peers else ""
    actors = f"{node.actors} actor{'s' * (node.actors != 1)}"
    yield Line("process", f"{node.pid} on {node.host}  up {duration(node.up_s)}  {actors}{peers}", "magenta")
    if node.dead_letters:
        yield Line("dead letters", str(node.dead_letters), "red")
    for letter in node.last_dead_letters[-DEAD_LETTERS:]:
        text = f"{_short_name(letter.message)} to {letter.to}, {duration(letter.ago_s)} ago"
        yield Line("-", f"{text}: {one_line(letter.why)}" if letter.why else text, "dim")


def _handler(one: HandlerReport) -> str:
    rate = "" if one.rate_per_s is None else f"{one.rate_per_s:.1f}/s  "
    failed = f"  {one.failed} failed" if one.failed else ""
    mean_s = one.seconds / one.count if one.count else 0.0
    return f"{one.count}  {rate}mean {duration(mean_s)}  p99 {duration(one.p99_s)}{failed}"


# --- traces -----------------------------------------------------------------------------------------


def trace_line(one: Traced) -> str:
    """A message that was handled, in a line."""
    at = datetime.fromtimestamp(one.at_s).strftime("%H:%M:%S.%f")
    cause = f"<- {one.cause:x}" if one.cause else ""
    text = (
        f"{at}  {one.actor}  {_short_name(one.message)}  {one.id:x} {cause}".rstrip()
        + f"  {duration(one.duration_s)}  {one_line(one.outcome)}"
    )
    return f"({one.lost} lost)\n{text}" if one.lost else text


def trace_fields(one: Traced) -> dict[str, Any]:
    """The same for scripts: ids as hex digits, because they are longer than what JSON's numbers can be."""
    fields: dict[str, Any] = msgspec.to_builtins(one)
    return {**fields, "id": f"{one.id:x}", "cause": f"{one.cause:x}" if one.cause else None}


# --- words ------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """In the unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02}m" if minutes >= 60 else f"{minutes}m{rest:02}s"


def _short_name(name: str) -> str:
    """`package.module:Class` without its module."""
    return one_line(name.rpartition(":")[2])


def _fields(summary: Mapping[str, Any]) -> str:
    return "  ".join(f"{one_line(str(name))}={one_line(str(value))}" for name, value in summary.items())


def one_line(text: str) -> str:
    """What a policy or a harness wrote may be in it: no line break, no terminal's command comes through."""
    text = " ".join(text.split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return text if text.isprintable() else repr(text)
