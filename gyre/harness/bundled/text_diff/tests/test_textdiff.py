import random
from itertools import pairwise

import pytest
from textdiff import apply, diff, distance, merge, patch, reverse, unified


def changes(operations):
    return sum(kind != "keep" for kind, _ in operations)


def longest(a, b):
    """Of the common subsequences of two lists."""
    row = [0] * (len(b) + 1)
    for x in a:
        above = row
        row = [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
    return row[-1]


def lists(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        yield (
            [rng.choice("abc") for _ in range(rng.randrange(12))],
            [rng.choice("abc") for _ in range(rng.randrange(12))],
        )


def test_the_same():
    assert diff(["a", "b"], ["a", "b"]) == [("keep", "a"), ("keep", "b")]


def test_nothing():
    assert diff([], []) == []


def test_all_is_new():
    assert diff([], ["a", "b"]) == [("add", "a"), ("add", "b")]


def test_all_is_gone():
    assert diff(["a"], []) == [("remove", "a")]


def test_a_change():
    assert diff(list("abc"), list("axc")) == [("keep", "a"), ("remove", "b"), ("add", "x"), ("keep", "c")]


def test_removed_comes_before_added():
    for a, b in lists(200):
        kinds = [kind for kind, _ in diff(a, b)]
        assert ("add", "remove") not in list(pairwise(kinds))


def test_it_is_as_short_as_possible():
    for a, b in lists(200, seed=1):
        assert changes(diff(a, b)) == len(a) + len(b) - 2 * longest(a, b)


def test_distance():
    assert distance(list("kitten"), list("sitting")) == 5
    assert distance([], []) == 0


def test_it_makes_the_other():
    for a, b in lists(200, seed=2):
        operations = diff(a, b)
        assert [item for kind, item in operations if kind != "add"] == a
        assert [item for kind, item in operations if kind != "remove"] == b


def test_apply():
    for a, b in lists(100, seed=3):
        assert apply(a, diff(a, b)) == b


@pytest.mark.parametrize("other", [["a"], ["a", "x"], ["a", "b", "c"]])
def test_apply_to_another_list(other):
    with pytest.raises(ValueError):
        apply(other, diff(["a", "b"], ["a", "c"]))


def test_reverse():
    for a, b in lists(100, seed=4):
        back = reverse(diff(a, b))
        assert apply(b, back) == a
        kinds = [kind for kind, _ in back]
        assert ("add", "remove") not in list(pairwise(kinds))


def test_items_of_other_types():
    assert diff([1, (2, 3), None], [1, None]) == [("keep", 1), ("remove", (2, 3)), ("keep", None)]


def test_unified():
    a = [f"line {n}" for n in range(1, 11)]
    b = [*a[:4], "new", *a[5:]]
    assert unified(a, b) == [
        "@@ -2,7 +2,7 @@",
        *(f" line {n}" for n in (2, 3, 4)),
        "-line 5",
        "+new",
        *(f" line {n}" for n in (6, 7, 8)),
    ]


def test_unified_of_the_same():
    assert unified(["a"], ["a"]) == []


def test_unified_of_an_empty_list():
    assert unified([], ["a"]) == ["@@ -0,0 +1 @@", "+a"]
    assert unified(["a", "b"], []) == ["@@ -1,2 +0,0 @@", "-a", "-b"]


def test_unified_without_context():
    assert unified(list("abc"), list("axc"), context=0) == ["@@ -2 +2 @@", "-b", "+x"]
    assert unified(list("abc"), list("abxc"), context=0) == ["@@ -2,0 +3 @@", "+x"]


def test_hunks_that_are_near_are_one():
    a = [str(n) for n in range(20)]
    near, far = a.copy(), a.copy()
    near[3] = near[10] = far[3] = far[11] = "x"
    assert sum(line.startswith("@@") for line in unified(a, near)) == 1
    assert sum(line.startswith("@@") for line in unified(a, far)) == 2


def test_patch():
    for context in (0, 1, 3):
        for a, b in lists(100, seed=5):
            assert patch(a, unified(a, b, context)) == b


def test_patch_of_another_list():
    lines = unified(list("abcdef"), list("abxdef"))
    with pytest.raises(ValueError):
        patch(list("abzdef"), lines)
    with pytest.raises(ValueError):
        patch(list("ab"), lines)


def test_patch_of_what_is_none():
    with pytest.raises(ValueError):
        patch(["a"], ["hello"])


def test_merge_of_changes_apart():
    merged, conflicts = merge(list("abcdef"), list("Abcdef"), list("abcdeF"))
    assert ("".join(merged), conflicts) == ("AbcdeF", [])


def test_merge_where_one_changed_nothing():
    assert merge(list("abc"), list("abc"), list("axc")) == (list("axc"), [])
    assert merge(list("abc"), list("axc"), list("abc")) == (list("axc"), [])


def test_merge_of_the_same_change():
    assert merge(list("abc"), list("axc"), list("axc")) == (list("axc"), [])


def test_merge_of_a_conflict():
    assert merge(list("abc"), list("axc"), list("ayc")) == (list("axc"), [(["b"], ["x"], ["y"])])


def test_merge_of_additions_in_one_place():
    assert merge(list("ab"), list("axb"), list("ayb")) == (list("axb"), [([], ["x"], ["y"])])


def test_merge_of_removed_and_changed():
    merged, conflicts = merge(list("abcd"), list("ad"), list("abXd"))
    assert (merged, conflicts) == (list("ad"), [(list("bc"), [], list("bX"))])


def test_merge_of_neighbours_is_a_conflict():
    _, conflicts = merge(list("abcd"), list("aXcd"), list("abYd"))
    assert conflicts == [(list("bc"), list("Xc"), list("bY"))]


@pytest.mark.timeout(20)
def test_long_lists_are_quick():
    rng = random.Random(0)
    a = [rng.randrange(10**6) for _ in range(2000)]
    b = a.copy()
    for at in rng.sample(range(2000), 20):
        b[at] = -at
    assert distance(a, b) == 40
