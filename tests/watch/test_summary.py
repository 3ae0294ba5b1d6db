from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre.watch import Summary, write_summary

SUMMARY = Summary(
    name="tidy",
    steps=10,
    seconds=91.5,
    reward_first=0.25,
    reward_last=None,
    role_changes=6,
    role_changes_with_calls_in_flight=3,
    satellite_micro_steps=4,
    failed_calls=0,
    compactions=2,
    sub_agents=3,
    retries=1,
    checkpoint="/runs/tidy/checkpoints/10",
)


def test_the_summary_is_a_file_and_the_last_line_of_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summary(tmp_path, SUMMARY)
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line) == json.loads((tmp_path / "summary.json").read_text())
    assert json.loads(line)["reward_first"] == 0.25
    assert json.loads(line)["reward_last"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_it_is_printed_where_it_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError):
        write_summary(tmp_path / "none", SUMMARY)
    assert json.loads(capsys.readouterr().out)["name"] == "tidy"
