from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from gyre.watch import configure_logging
from gyre.watch.sinks import Event


@pytest.fixture(autouse=True)
def _library_logging_as_before() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = handlers, level


class Collected:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.closed = False

    def __call__(self, event: Event) -> None:
        self.events.append(dict(event))

    def close(self) -> None:
        self.closed = True


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_lines_with_time_and_job(tmp_path: Path) -> None:
    configure_logging(tmp_path, False, "tidy")
    structlog.get_logger().info("role_change", cell=1, role="train", waterlevel="4 <= 24 - 8")
    (event,) = lines(tmp_path / "events.jsonl")
    assert event["time"].endswith("Z")
    assert event.pop("monotonic_s") > 0
    assert event | {"time": ""} == {
        "event": "role_change",
        "level": "info",
        "time": "",
        "job": "tidy",
        "cell": 1,
        "role": "train",
        "waterlevel": "4 <= 24 - 8",
    }


def test_loggers_made_before_the_configuration_use_it(tmp_path: Path) -> None:
    log = structlog.get_logger()
    configure_logging(tmp_path, False, "tidy")
    log.info("cell_up", cell=1)
    assert [event["event"] for event in lines(tmp_path / "events.jsonl")] == ["cell_up"]


def test_steps_and_evaluations_are_metrics(tmp_path: Path) -> None:
    configure_logging(tmp_path, False, "tidy")
    for name in ("step", "cell_up", "eval"):
        structlog.get_logger().info(name, step=1)
    assert [event["event"] for event in lines(tmp_path / "metrics.jsonl")] == ["step", "eval"]
    assert len(lines(tmp_path / "events.jsonl")) == 3


def test_steps_come_with_the_reward_of_their_groups(tmp_path: Path) -> None:
    configure_logging(tmp_path, False, "tidy")
    structlog.get_logger().info("group", step=4, scores={"g1.0": 0.25, "g1.1": 0.75})
    structlog.get_logger().info("step", step=4)
    assert [event["reward"] for event in lines(tmp_path / "metrics.jsonl")] == [0.5]


def test_debug_events_go_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(tmp_path, False, "tidy")
    structlog.get_logger().debug("detail")
    assert lines(tmp_path / "events.jsonl") == []
    assert capsys.readouterr().err == ""


def test_without_a_terminal_each_event_is_a_plain_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(tmp_path, False, "tidy")
    structlog.get_logger().info("step", step=3, reward=0.123456, note="two words")
    structlog.get_logger().warning("cell_down", cell=2)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line[9:] for line in err.splitlines()] == [
        "step step=3 reward=0.1235 note='two words'",
        "warning: cell_down cell=2",
    ]


def test_a_line_has_no_trace_no_wall_of_text_and_no_commands_for_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(tmp_path, False, "tidy")
    structlog.get_logger().error(
        "job_failed", reason="a\x1b[2Jb\nc", trace="Traceback\n  of layers", text="x" * 5000
    )
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown[9:].startswith(r"error: job_failed reason='a\x1b[2Jb\nc' text=xxx")
    assert shown.endswith("xxx...")
    assert "Traceback" not in shown
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["trace"], len(event["text"])) == ("Traceback\n  of layers", 5000)


def test_beside_a_terminal_view_only_warnings_are_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(tmp_path, True, "tidy")
    structlog.get_logger().info("step", step=3)
    structlog.get_logger().warning("cell_down", cell=2)
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["warning: cell_down cell=2"]
    assert len(lines(tmp_path / "events.jsonl")) == 2


def test_an_exception_comes_with_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(tmp_path, False, "tidy")
    try:
        raise ValueError("bad")
    except ValueError:
        structlog.get_logger().exception("actor_crashed")
    (event,) = lines(tmp_path / "events.jsonl")
    assert event["level"] == "error"
    assert event["exception"].endswith("ValueError: bad")
    assert "ValueError: bad" in capsys.readouterr().err


def test_what_libraries_log_is_an_event(tmp_path: Path) -> None:
    configure_logging(tmp_path, False, "tidy")
    logging.getLogger("aiohttp.server").warning("odd %s", "request")
    logging.getLogger("aiohttp.server").info("unimportant")
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["event"], event["logger"], event["message"]) == (
        "library_log",
        "aiohttp.server",
        "odd request",
    )


def test_further_sinks_take_every_event_until_the_log_is_closed(tmp_path: Path) -> None:
    log = configure_logging(tmp_path, False, "tidy")
    sink = Collected()
    log.add(sink)
    structlog.get_logger().info("burst", step=2)
    log.close()
    structlog.get_logger().info("after")
    assert [event["event"] for event in sink.events] == ["burst"]
    assert sink.closed


def test_a_sink_that_fails_is_told_once_and_harms_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Collected):
        def __call__(self, event: Event) -> None:
            raise RuntimeError("no network")

    log = configure_logging(tmp_path, True, "tidy")
    after = Collected()
    log.add(Failing())
    log.add(after)
    structlog.get_logger().info("one")
    structlog.get_logger().info("two")
    assert capsys.readouterr().err == "gyre: Failing failed, the job goes on: RuntimeError: no network\n"
    assert [event["event"] for event in after.events] == ["one", "two"]


def test_a_stderr_that_takes_nothing_does_not_stop_the_job(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
import structlog
from gyre.watch import configure_logging
configure_logging(Path({str(tmp_path)!r}), False, "tidy")
structlog.get_logger().info("step", step=1)
"""
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", code], stderr=full, check=True, timeout=50)
    assert [event["event"] for event in lines(tmp_path / "events.jsonl")] == ["step"]
