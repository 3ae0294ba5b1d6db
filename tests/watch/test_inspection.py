from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gyre.actors.looking import (
    ActorReport,
    DeadLetterReport,
    FailureReport,
    HandlerReport,
    HandlingReport,
    NodeReport,
    Traced,
)
from gyre.watch.inspection import duration, plain, trace_fields, trace_line, tree, with_rates

NODE = NodeReport(
    name="root",
    id="ab" * 8,
    host="trainer",
    pid=42,
    endpoint="unix:/x",
    up_s=192.0,
    counted_s=0.0,
    actors=3,
    peers=("cell-0", "cell-1"),
    dead_letters=2,
    last_dead_letters=(DeadLetterReport(to="a#1", message="m:Bump", why="stopped", ago_s=3.0),),
)


def actor(path: str, **about: Any) -> ActorReport:
    return ActorReport(path=path, kind="package.module:Worker", **{"state": "running", **about})


def handler(count: int, **about: Any) -> HandlerReport:
    base = {"message": "m:Add", "failed": 0, "seconds": count * 0.002, "p99_s": 0.0025}
    return HandlerReport(count=count, **{**base, **about})


def job(*children: ActorReport) -> ActorReport:
    return ActorReport(path="", kind="node", state="running", node=NODE, children=children)


def rich(report: ActorReport) -> str:
    file = io.StringIO()
    Console(file=file, force_terminal=True, width=200, color_system=None).print(tree(report))
    return file.getvalue()


def test_an_actor_in_plain_lines() -> None:
    report = actor(
        "top/a",
        capacity=8,
        waiting=3,
        writers=2,
        restarts=1,
        summary={"step": 3, "role": "train"},
        handling=(HandlingReport(message="m:Hang", for_s=75.0), HandlingReport(message="m:Old", for_s=None)),
        handlers=(handler(10, rate_per_s=2.5, failed=1),),
        last_error=FailureReport(error="ValueError: no", message="m:Add", ago_s=4.0, traceback=""),
    )
    assert [*plain(report)] == [
        "a  Worker  mailbox 3/8  senders that wait for room: 2  1 restart",
        "    state  step=3  role=train",
        "    handling  Hang for 75 s",
        "    handling  Old",
        "    Add  10  2.5/s  mean 2 ms  p99 2.5 ms  1 failed",
        "    last error  ValueError: no (4 s ago on Add)",
    ]


def test_a_tree_in_plain_lines() -> None:
    ended = FailureReport(error="exit: (killed by SIGKILL)", message="", ago_s=1.0, traceback="")
    child = actor("top/a", state="unanswered", why="no answer within 1 s", last_error=ended)
    assert [*plain(job(actor("top", children=(child,), hidden=3)))] == [
        "root",
        "    process  42 on trainer  up 3m12s  3 actors  peers cell-0, cell-1",
        "    dead letters  2",
        "    -  Bump to a#1, 3 s ago: stopped",
        "  top  Worker",
        "    a  Worker  UNANSWERED: no answer within 1 s",
        "        last error  exit: (killed by SIGKILL) (1 s ago, the end of the life before)",
        "    ... and 3 more",
    ]


def test_a_terminal_is_shown_the_same() -> None:
    report = job(actor("top", summary={"step": 3}, children=(actor("top/a"), actor("top/b")), hidden=2))
    shown = rich(report)
    for line in plain(report):
        for word in line.split():
            assert word in shown


@pytest.mark.parametrize("text", ["\x1b[31mred", "two\nlines", "x" * 1000, "[bold]markup[/bold]", "[/]"])
def test_what_strangers_wrote_stays_text_in_a_line(text: str) -> None:
    report = actor("a", summary={"said": text, text[:20]: 1}, why=text, state="ended")
    lines = [*plain(report)]
    assert len(lines) == 2
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    assert "\x1b[31m" not in rich(report)
    if text.startswith("["):
        assert text in rich(report)


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = job(actor("a", handlers=(handler(10),)), actor("gone"))
    again = actor("b", handlers=(handler(7),))
    after = job(actor("a", handlers=(handler(30), handler(4, message="m:New"))), again)
    found = with_rates(after, before, elapsed_s=2.0)
    a, b = found.children
    assert [one.rate_per_s for one in a.handlers] == [10.0, 2.0]
    assert [one.rate_per_s for one in b.handlers] == [None]  # it was not there before


def test_the_rate_of_a_new_life_starts_at_nothing() -> None:
    before = job(actor("a", incarnation=1, handlers=(handler(100),)))
    after = job(actor("a", incarnation=2, handlers=(handler(6),)))
    assert with_rates(after, before, 3.0).children[0].handlers[0].rate_per_s == 2.0


# --- traces -----------------------------------------------------------------------------------------


def traced(**about: Any) -> Traced:
    base = {"at_s": 0.25, "actor": "top/a", "incarnation": 1, "message": "m:Add", "id": 2**61, "cause": 0}
    return Traced(**{**base, "duration_s": 0.0012, "outcome": "ok", **about})


def test_a_traced_message_in_a_line() -> None:
    time, *words = trace_line(traced()).split()
    assert time.endswith("00.250000")
    assert words == ["top/a", "Add", f"{2**61:x}", "1.2", "ms", "ok"]
    assert f"{2**61:x} <- {2**60:x}  " in trace_line(traced(cause=2**60))
    assert trace_line(traced(lost=7)).splitlines()[0] == "(7 lost)"


def test_ids_for_scripts_are_text() -> None:
    fields = trace_fields(traced(cause=255))
    assert (fields["id"], fields["cause"]) == (f"{2**61:x}", "ff")
    assert trace_fields(traced())["cause"] is None


@given(st.text())
def test_any_outcome_is_a_line(outcome: str) -> None:
    line = trace_line(traced(outcome=outcome))
    assert len(line.splitlines()) == 1
    assert line.isprintable()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (5e-6, "5 us"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (119, "119 s"),
        (192, "3m12s"),
        (7300, "2h01m"),
    ],
)
def test_durations_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
