from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from benchmarks.report import Report


def _report() -> Report:
    report = Report("kettle")
    report.figure("boil_s", 123.456789)
    report.at_least("litres_per_s", 2.0, 2.0)
    report.at_most("noise_db", 71.0, 70.0)
    report.unmet("steam_bar", ">=", 1.0, "no gauge")
    return report


def test_the_line_holds_figures_and_gates() -> None:
    assert json.loads(_report().json_line()) == {
        "benchmark": "kettle",
        "figures": {"boil_s": 123.5},
        "gates": {
            "litres_per_s": {"value": 2.0, "limit": 2.0, "met": True, "sense": ">="},
            "noise_db": {"value": 71.0, "limit": 70.0, "met": False, "sense": "<="},
            "steam_bar": {"value": None, "limit": 1.0, "met": False, "sense": ">=", "reason": "no gauge"},
        },
    }


def test_it_is_one_line() -> None:
    assert "\n" not in _report().json_line()


def test_a_gate_is_judged_by_what_was_measured_not_by_what_is_shown() -> None:
    report = Report("kettle")
    report.at_most("noise_db", 70.0001, 70.0)
    assert not report.gates["noise_db"].met


def test_it_is_met_when_every_gate_is() -> None:
    report = Report("kettle")
    report.at_least("litres_per_s", 3.0, 2.0)
    assert report.met
    report.unmet("steam_bar", ">=", 1.0, "no gauge")
    assert not report.met


def test_two_figures_of_one_name_are_an_error() -> None:
    report = _report()
    with pytest.raises(ValueError, match="boil_s"):
        report.figure("boil_s", 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_no_figure(value: float) -> None:
    with pytest.raises(ValueError, match="no figure"):
        Report("kettle").figure("boil_s", value)


def test_the_table_says_why_a_gate_is_not_met() -> None:
    out = io.StringIO()
    _report().print(Console(file=out, width=120))
    text = out.getvalue()
    assert "NO: no gauge" in text
    assert ">= 2" in text
    assert "boil_s" in text


def test_a_table_without_rows_is_not_shown() -> None:
    report = Report("kettle")
    report.at_least("litres_per_s", 3.0, 2.0)
    out = io.StringIO()
    report.print(Console(file=out, width=120))
    assert "figure" not in out.getvalue()
