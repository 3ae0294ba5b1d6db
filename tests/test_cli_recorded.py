"""`gyre inspect RUN` and `gyre resample RUN` as a user calls them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre.cli import app
from tests.recorded.folders import execution_of, group_of, tidy, write_run, write_tokenizer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two executions of a complete group, one that is over in a group that is not."""
    calls = [tidy("g000000.00"), tidy("g000000.01")]
    entries = [
        *group_of("g000000", [1.0, 0.0], calls),
        *execution_of("g000001.00", tidy("g000001.00"), 1.0, 2),
    ]
    return write_run(tmp_path / "runs" / "small", entries)


def gyre(*arguments: object) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout, stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout.splitlines(), result.stderr


def test_a_run_is_listed(run: Path) -> None:
    code, (state, head, *rows), err = gyre("inspect", run)
    assert (code, err, state) == (0, "", f"{run}: stopped")
    assert head.split()[:8] == [
        "execution",
        "task",
        "step",
        "score",
        "advantage",
        "sampled",
        "trained",
        "turns",
    ]
    first = rows[0].split()
    assert first[:12] == ["g000000.00", "task-0", "0", "1", "+1.000", "7", "6", "3", "0", "1", "1", "1.5"]
    assert rows[0].endswith("completed       3 main, 1 sub_agent")
    assert [row.split()[6] for row in rows] == ["6", "6", "-"]
    assert len(gyre("inspect", run, "--group", "g000001")[1]) == 3


def test_the_list_for_scripts(run: Path) -> None:
    code, rows, _ = gyre("inspect", run, "--json")
    assert code == 0
    assert [json.loads(row)["trained_tokens"] for row in rows] == [6, 6, None]


def test_the_newest_run_is_the_default(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[1])
    assert gyre("inspect", "--tree", "g000000.00") == gyre("inspect", run, "--tree", "g000000.00")


def test_a_tree_shows_forks_spawns_and_draws(run: Path) -> None:
    code, shown, err = gyre("inspect", run, "--tree", "g000000.00")
    assert (code, err) == (0, "")
    text = "\n".join(shown)
    assert "7 sampled tokens: 6 trained, 1 not_drawn" in text
    assert "\n  0  main  2+2 tokens  v0  draw " in text
    assert "forks into 2, 3" in text
    assert "\n    2  main  1+3 tokens  v0  draw " in text
    assert "\n  1  sub_agent  asked for by 0  1+1 tokens  v0  not_drawn  done" in text
    assert "\x1b" not in text
    assert [line.split()[:2] for line in shown if line.startswith("draw")] == [["draw", "0"], ["draw", "1"]]
    code, nodes, _ = gyre("inspect", run, "--tree", "g000000.00", "--json")
    assert [json.loads(node)["reason"] for node in nodes] == [None, "not_drawn", None, None]


def test_tokens_with_their_text_where_there_is_a_tokenizer(run: Path) -> None:
    code, rows, err = gyre("inspect", run, "--tokens", "g000000.00/2")
    assert code == 0
    assert "no text" in err
    write_tokenizer(run)
    code, rows, err = gyre("inspect", run, "--tokens", "g000000.00/2")
    assert (code, err) == (0, "")
    assert [row.split() for row in rows[1:]] == [
        ["4", "4", "context", "'t4'"],
        ["5", "13", "-0.5", "trained", "0", "'t13'"],
        ["6", "14", "-1", "trained", "0", "'t14'"],
        ["7", "15", "-1.5", "trained", "0", "'t15'"],
    ]
    code, rows, _ = gyre("inspect", run, "--tokens", "g000000.00/b", "--json")
    assert json.loads(rows[1]) == {
        "position": 1,
        "token": 12,
        "text": "t12",
        "logprob": -0.5,
        "mask": "excluded",
        "reason": "not_drawn",
        "draw": None,
        "version": 0,
        "kv_version": 0,
    }


def test_an_export_is_written(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    code, said, _ = gyre("inspect", run, "--export", path, "--by", "span")
    assert (code, said) == (0, [f"{path}: 24 rows, one for each span"])
    assert len(path.read_text().splitlines()) == 24


def test_sampled_again_it_says_what_would_be_trained(run: Path) -> None:
    same = gyre("resample", run)
    assert same[0] == 0
    assert same[1][1].split()[:6] == ["g000000", "0", "4", "12", "1", "28"]
    code, rows, err = gyre("resample", run, "--set", "sampling.max_trajectories=1", "--json")
    assert (code, err) == (0, "")
    (one,) = (json.loads(row) for row in rows)
    assert (one["was"]["trajectories"], one["would_be"]["trajectories"]) == (4, 2)
    for plan in (one["was"], one["would_be"]):
        assert plan["trained_tokens"] + sum(plan["excluded_tokens"].values()) == 14
    _, rows, _ = gyre("resample", run, "--set", "sampling.draw=all")
    assert rows[1].split()[2:8] == ["4", "->", "6", "12", "->", "14"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["inspect", "RUN", "--tree", "g000009.00"],
            "no execution g000009.00: there are g000000.00, g000000.01",
        ),
        (["inspect", "RUN", "--tokens", "g000000.00"], "a call is named EXECUTION/NUMBER"),
        (["inspect", "RUN", "--tokens", "g000000.00/9"], "has no call 9: its calls are 0 to 3"),
        (["inspect", "RUN", "--group", "g9"], "no execution is of a group g9"),
        (["inspect", "RUN", "--export", "x.csv"], "ends in .jsonl or .parquet"),
        (["inspect", "RUN/none", "--tree", "x"], "there is no run in this folder"),
        (["resample", "RUN", "--group", "g000001"], "no training group g000001 is complete"),
        (["resample", "RUN", "--set", "train.lr=1"], "allowed: sampling.* and train.micro_step_tokens"),
        (["resample", "RUN", "--set", "sampling.max_trajectories=0"], "sampling.max_trajectories: found 0"),
        (["resample", "RUN", "--set", "sampling.drow=all"], "did you mean sampling.draw?"),
    ],
)
def test_what_cannot_be_shown_says_why(run: Path, arguments: list[str], why: str) -> None:
    code, _, err = gyre(*(argument.replace("RUN", str(run)) for argument in arguments))
    assert code == 2
    assert why in err


def test_a_damaged_entry_is_told_and_the_rest_is_shown(run: Path) -> None:
    with sqlite3.connect(run / "journal.db") as connection:
        connection.execute("UPDATE calls SET record = x'00' WHERE execution = 'g000000.00'")
    code, shown, err = gyre("inspect", run)
    assert code == 4
    assert [row.split()[0] for row in shown[2:]] == ["g000000.01", "g000001.00"]
    assert "g000000.00: cannot be read" in err
    assert "one entry of the journal cannot be read" in err
