from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given

from gyre.trajectory.records import UNFINISHED, CallRecord
from gyre.trajectory.tree import TrajectoryTree, TreeError
from tests.trajectory.trees import random_records, record, tree_of


def test_a_path_is_the_parents_path_and_what_the_call_adds() -> None:
    tree = tree_of(
        record("a", new=[1, 2], out=[3, 4], version=7), record("b", "a", new=[5], out=[6, 7], version=8)
    )
    tokens = tree.path_tokens(tree.nodes[1])
    assert tokens.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tokens.sampled.tolist() == [False, False, True, True, False, True, True]
    assert tokens.logprobs.tolist() == [0, 0, -0.5, -1.0, 0, -0.5, -1.0]
    assert tokens.versions.tolist() == [-1, -1, 7, 7, -1, 8, 8]
    assert [array.dtype for array in tokens] == [np.int32, np.bool_, np.float32, np.int32, np.int32]


def test_two_children_of_one_call_are_a_fork() -> None:
    tree = tree_of(record("a"), record("b", "a"), record("c", "a"), record("d", "b"))
    assert [node.call for node in tree.children(tree.nodes[0])] == ["b", "c"]
    assert [node.call for node in tree.leaves()] == ["c", "d"]
    assert [node.call for node in tree.path(tree.nodes[3])] == ["a", "b", "d"]


def test_a_prompt_that_extends_nothing_is_a_new_root() -> None:
    tree = tree_of(record("a"), record("b"))
    assert [node.call for node in tree.roots()] == ["a", "b"]


def test_an_unknown_parent_is_an_error_that_names_execution_call_and_parent() -> None:
    tree = tree_of(record("a"))
    with pytest.raises(TreeError, match=r"execution g000000\.00, call b: its parent zz is not recorded"):
        tree.add(record("b", "zz"))
    assert len(tree.nodes) == 1


def test_a_record_of_another_execution_is_refused() -> None:
    with pytest.raises(TreeError, match=r"of execution g000001\.00"):
        TrajectoryTree("g000000.00").add(record("a", execution="g000001.00"))


def test_the_same_record_again_changes_nothing() -> None:
    tree = tree_of(record("a"), record("b", "a"))
    assert tree.add(record("b", "a")) is False
    assert len(tree.nodes) == 2


def test_a_call_that_nobody_was_answered_is_no_node_and_its_tokens_are_known() -> None:
    tree = tree_of(record("a"), record("b", "a", out=[4, 5], finish_reason=UNFINISHED))
    assert [node.call for node in tree.leaves()] == ["a"]
    assert (tree.unfinished, tree.sampled_tokens) == ({"b": 2}, 3)
    assert tree.add(record("b", "a", out=[4, 5], finish_reason=UNFINISHED)) is False
    assert tree.sampled_tokens == 3
    with pytest.raises(TreeError, match="its parent b is not recorded"):
        tree.add(record("c", "b"))


@pytest.mark.parametrize(
    "other",
    [record("b", "a", out=[9]), record("b", None), record("b", "a", version=3)],
    ids=lambda r: str(r.parent),
)
def test_another_record_under_a_taken_id_is_refused(other: CallRecord) -> None:
    tree = tree_of(record("a"), record("b", "a"))
    with pytest.raises(TreeError, match="other content"):
        tree.add(other)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", (), "1 sampled tokens with 0 log-probabilities"),
        ("versions", (1, 2), "2 versions"),
        ("kv_versions", (1, 2), "2 of KV"),
        ("logprobs", (float("nan"),), "not finite"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(field: str, value: tuple[float, ...], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        tree_of(msgspec.structs.replace(record("a"), **{field: value}))


def test_a_call_without_output_is_a_node_without_sampled_tokens() -> None:
    tree = tree_of(record("a", out=[]))
    assert tree.sampled_tokens == 0
    assert tree.path_tokens(tree.nodes[0]).token_ids.tolist() == [1, 2]


@given(random_records())
def test_every_call_lies_on_a_path_and_is_sampled_where_its_output_is(records: list[CallRecord]) -> None:
    tree = tree_of(*records)
    by_call = {item.call: item for item in records}
    on_paths = set()
    for leaf in tree.leaves():
        path = tree.path(leaf)
        tokens = tree.path_tokens(leaf)
        prompts_and_outputs = [
            by_call[node.call].new_input_ids + by_call[node.call].output_ids for node in path
        ]
        assert tuple(tokens.token_ids.tolist()) == sum(prompts_and_outputs, ())
        outputs = sum((by_call[node.call].output_ids for node in path), ())
        assert tuple(tokens.token_ids[tokens.sampled].tolist()) == outputs
        assert (tokens.versions[~tokens.sampled] == -1).all()
        on_paths.update(node.call for node in path)
    assert on_paths == set(by_call)
