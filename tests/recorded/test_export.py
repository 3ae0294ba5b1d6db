from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from gyre.recorded import ExportError, RecordedRun, export, lines
from gyre.recorded.export import check_path
from gyre.recorded.rows import LINES, By, Line
from tests.recorded.folders import group_of, tidy, write_run
from tests.recorded.test_run import never

DOCS = Path(__file__).parents[2] / "docs" / "recorded_runs.md"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    calls = [tidy("g000000.00"), tidy("g000000.01"), []]
    with RecordedRun(write_run(tmp_path / "small", group_of("g000000", [1.0, None, 0.0], calls))) as run:
        yield run


@pytest.mark.parametrize("by", get_args(By))
def test_both_formats_have_the_same_rows(run: RecordedRun, by: By, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    counts = [
        export(tmp_path / name, LINES[by], lines(run, by, None, never)) for name in ("a.jsonl", "a.parquet")
    ]
    of_json = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    of_parquet = parquet.read_table(tmp_path / "a.parquet").to_pylist(maps_as_pydicts="strict")
    assert of_parquet == of_json
    assert counts == [len(of_json)] * 2
    assert len(of_json) > 2


def test_an_export_that_fails_leaves_what_was_there(run: RecordedRun, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("before")

    def broken() -> Iterator[Line]:
        yield from lines(run, "execution", None, never)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(path, LINES["execution"], broken())
    assert path.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "small"]


def test_where_parquet_cannot_be_written_the_fix_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ExportError, match=r"pip install 'gyre\[parquet\]'`, or export to a \.jsonl file"):
        check_path(tmp_path / "a.parquet")
    check_path(tmp_path / "a.jsonl")


def test_a_file_of_another_kind_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"ends in \.jsonl or \.parquet"):
        check_path(tmp_path / "a.csv")
    with pytest.raises(ExportError, match="there is no folder"):
        check_path(tmp_path / "x" / "a.jsonl")


@pytest.mark.parametrize("by", get_args(By))
def test_every_column_is_documented(by: By) -> None:
    _, _, section = DOCS.read_text().partition(f"### `--by {by}`")
    table = section.partition("### ")[0]
    for field in msgspec.structs.fields(LINES[by]):
        assert f"`{field.name}`" in table
