from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.watch.sinks import JsonLines

from .statuses import event


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Sets how large files of this process may grow: beyond it writing fails, as on a full disk."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def test_each_event_is_a_line(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl")
    sink(event("step", step=1, folder=Path("/a")))
    sink(event("cell_up", cell=0))
    sink.close()
    assert [(line["event"], line.get("folder")) for line in lines(tmp_path / "events.jsonl")] == [
        ("step", "/a"),
        ("cell_up", None),
    ]


def test_a_resumed_job_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonLines(tmp_path / "events.jsonl")
        sink(event("step", step=step))
        sink.close()
    assert [line["step"] for line in lines(tmp_path / "events.jsonl")] == [1, 2]


def test_only_named_events_are_taken(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", frozenset({"step"}))
    sink(event("cell_up"))
    sink(event("step", step=1))
    sink.close()
    assert [line["event"] for line in lines(tmp_path / "metrics.jsonl")] == ["step"]


def test_a_full_disk_is_told_once_and_writing_goes_on_when_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file_limit: Callable[[int], None]
) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonLines(path)
    sink(event("first"))
    file_limit(path.stat().st_size + 10)
    sink(event("lost"))
    sink(event("lost"))
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{path}: File too large" in told
    file_limit(resource.RLIM_INFINITY)
    sink(event("last"))
    sink.close()
    assert "2 events were lost" in capsys.readouterr().err
    assert [line["event"] for line in lines(path)] == ["first", "last"]


def test_a_device_without_room_harms_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    sink = JsonLines(Path("/dev/full"))
    sink(event("lost"))
    sink.close()
    assert "No space left on device" in capsys.readouterr().err
