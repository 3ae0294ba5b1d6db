"""The plots of an export."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from gyre.recorded import RecordedRun, export, lines
from gyre.recorded.rows import LINES, By
from tests.recorded.folders import group_of, tidy, write_run
from tests.recorded.test_run import never

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook" / "plots.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plots", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_the_plots_show(suffix: str, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    calls = [tidy("g000000.00"), tidy("g000000.01")]
    write_run(tmp_path / "small", group_of("g000000", [1.0, 0.5], calls))
    by: By
    with RecordedRun(tmp_path / "small") as run:
        for by in ("execution", "span"):
            export(tmp_path / f"{by}.{suffix}", LINES[by], lines(run, by, None, never))
    plots = load()
    assert plots.mean_scores(plots.rows(tmp_path / f"execution.{suffix}"), "train") == {0: 0.75}
    went, logprobs = plots.sampled_tokens(plots.rows(tmp_path / f"span.{suffix}"))
    assert (went, len(logprobs)) == ({"trained": 12, "not_drawn": 2}, 12)
