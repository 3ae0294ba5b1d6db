import ast
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.harness.canaries import SOWN, sow
from gyre.harness.outcomes import functions_in

PARTS = st.sampled_from(
    [
        "import answer\n",
        '"""text\nmore"""\r\n',
        "def test_right_way():\n    assert answer.right()\n",
        "@mark\n@other(\n  1)\ndef test_left():\n    def test_inner(): ...\n",
        "class TestIt:\n    def test_it(self): ...\n",
        "async def test_later(): ...\n",
        "if True:\n    x = 1; y = 2\n",
        "pytestmark = mark\n",
        "TEXT = '''\ndef test_quoted(): ...\n'''\n",
    ]
)
FILES = st.dictionaries(
    st.sampled_from(["test_a.py", "deep/test_b.py", "deep/c_test.py"]),
    st.tuples(
        st.sampled_from(["", "\ufeff"]), st.lists(PARTS, max_size=5), st.sampled_from(["", "x = 1"])
    ).map(lambda parts: (parts[0] + "".join(parts[1]) + parts[2]).encode()),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(FILES, st.integers())
def test_tests_that_fail_are_added_and_nothing_else_is_changed(files: dict[str, bytes], seed: int) -> None:
    changed, names = sow(files, Random(seed))
    assert len(set(names)) == SOWN
    added: list[str] = []
    for file, source in changed.items():
        tree, before = ast.parse(source), ast.parse(files.get(file, b""))
        sown = [node for node in tree.body if getattr(node, "name", "") in names]
        added += [node.name for node in sown if isinstance(node, ast.FunctionDef)]
        tree.body = [node for node in tree.body if node not in sown]
        assert ast.dump(tree) == ast.dump(before)
    assert sorted(added) == sorted(names)


def test_they_are_named_as_others_and_lie_between_them() -> None:
    source = b"def test_wide_open(): ...\n\n\ndef test_half_shut(): ...\n"
    orders: set[int] = set()
    for seed in range(20):
        changed, names = sow({"test_a.py": source}, Random(seed))
        found = [name.rpartition("::")[2] for name in functions_in("", changed["test_a.py"])]
        orders.add(found.index("test_half_shut"))
        assert {word for name in names for word in name.split("_")} <= {
            *("test", "wide", "open", "half", "shut"),
            *"123456789",
        }
    assert len(orders) > 1


def test_marks_of_a_whole_file_are_not_theirs() -> None:
    source = b"pytestmark = pytest.mark.parametrize('n', [1])\ndef test_wide(n): ...\n"
    ((file, text),) = sow({"deep/test_a.py": source}, Random(0))[0].items()
    assert file.startswith("deep/test_") and file != "deep/test_a.py"
    assert len(list(functions_in(file, text))) == SOWN
