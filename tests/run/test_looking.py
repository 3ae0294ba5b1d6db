"""A running job, looked into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.run.conftest import Waited

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def actors(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield report
    for child in report["children"]:
        yield from actors(child)


def test_all_actors_of_all_processes_are_seen(waited: Waited) -> None:
    seen = {actor["path"]: actor for actor in actors(waited.report)}
    once = {
        "",
        "waterlevel",
        "queue",
        "trajectory",
        "proxy",
        "proxy/process",
        "fork-server",
        "harness",
        "stores",
        "stores/store",
        "satellites",
    }
    cells = {"cell-0", "satellites/cell-1"}
    ranks = {f"{cell}/rank-0" for cell in cells}
    executions = {path for path in seen if path.startswith("harness/")}
    assert set(seen) - executions == once | cells | ranks
    assert len(executions) == 16
    assert {actor["state"] for actor in seen.values()} == {"running"}
    assert len({actor["node"]["pid"] for actor in seen.values() if actor["node"]}) == 7
    assert {seen[path]["restarts"] for path in seen} == {0}


def test_actors_say_what_they_are_at(waited: Waited) -> None:
    seen = {actor["path"]: actor["summary"] for actor in actors(waited.report)}
    assert seen["waterlevel"]["step"] == 0
    assert seen["waterlevel"]["cells"] == "0:rollout 1:rollout"
    assert seen["queue"]["steps_committed"] == 0
    assert seen["trajectory"]["executions_open"] == 16
    assert seen["proxy/process"]["failed_calls"] == 0
    assert seen["harness"]["running"] == 16
    assert (seen["cell-0"]["core"], seen["cell-0"]["role"]) == (True, "rollout")
    assert seen["satellites/cell-1/rank-0"]["calls_running"] == 0
    assert not [path for path, summary in seen.items() if "summary_failed" in summary]


def test_statuses_are_traced_from_the_waterlevel_to_the_ranks(waited: Waited) -> None:
    """Metrics are served: again and again the root asks for a status, which goes through three processes."""
    by_id = {one["id"]: one for one in waited.trace}
    ranks = [
        one for one in waited.trace if one["message"].endswith(":GetRankStatus") and one["cause"] in by_id
    ]
    assert {one["actor"] for one in ranks} == {f"{c}/rank-0" for c in ("cell-0", "satellites/cell-1")}
    for rank in ranks:
        cell = by_id[rank["cause"]]
        assert cell["actor"] == rank["actor"].removesuffix("/rank-0")
        if cell["cause"] in by_id:
            assert by_id[cell["cause"]]["actor"] == "waterlevel"
    assert any(by_id[rank["cause"]]["cause"] in by_id for rank in ranks)


def test_the_file_by_which_it_was_found_is_gone(waited: Waited) -> None:
    assert not (waited.run_dir / "contact.json").exists()
