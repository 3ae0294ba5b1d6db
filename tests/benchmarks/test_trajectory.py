from __future__ import annotations

import pytest

from benchmarks.report import Report
from benchmarks.trajectory.__main__ import LONG, loads, measure_plan, measure_sharing, scored, step_of
from benchmarks.trajectory.shapes import SHAPES
from gyre.loss import MicroStep


@pytest.mark.parametrize("name", LONG)
def test_an_execution_has_as_many_calls_and_tokens_as_it_should(name: str) -> None:
    make, _ = LONG[name]
    tree = scored("g000000.00", 1.0, make("g000000.00", 60, 60 * 40)).tree
    assert len(tree.nodes) == 60
    assert sum(len(node.tokens.token_ids) for node in tree.nodes) == 60 * 40


def test_an_agent_compacts_forks_and_has_sub_agents() -> None:
    made = scored("g000000.00", 1.0, LONG["agent"][0]("g000000.00", 200, 200 * 40))
    assert set(made.roles.of_node) == {"main", "main_summary", "sub_agent"}
    assert (len(made.roles.summaries), len(made.roles.spawns)) == (3, 13)
    # Those of sub-agents, first answers that were not gone on with, summaries and the last call.
    assert len(made.tree.leaves()) == 13 + 16 + 3 + 1


def test_planning_is_measured_by_seconds_and_bytes() -> None:
    report = Report("trajectory")
    measure_plan(report, "agent_all", 1, calls=40, tokens=40 * 40)
    assert set(report.gates) == {"agent_all_s", "agent_all_peak_bytes"}
    assert report.met


def test_sharing_is_that_of_the_groups_trees() -> None:
    """Eight answers to one prompt in a piece: nothing is computed twice."""
    report = Report("trajectory")
    measure_sharing(report, "answers", 2)
    assert report.gates["answers_sharing_kept"].value == 1.0
    assert report.figures["answers_micro_steps"] == 2
    assert report.figures["answers_rows_to_tree"] == pytest.approx(3.3, abs=0.2)


def test_a_free_cell_takes_the_longest_that_is_left() -> None:
    (micro_steps,) = step_of(SHAPES["answers"], 1)
    (one,) = micro_steps[0].trajectories[:1]
    claimed = [
        MicroStep(id=str(count), step=0, group="", trajectories=(one,) * count) for count in (3, 9, 4, 6)
    ]
    assert loads(claimed, 2) == [12 * one.length_tokens, 10 * one.length_tokens]
