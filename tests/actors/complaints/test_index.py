"""Each complaint has its tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.actors.complaints import INDEX

ROOT = Path(__file__).parents[3]
PUBLIC_SOURCE = re.compile(r"[\w.-]+#\d+|gh-\d+|PR \d+|thespian")


def test_there_are_24() -> None:
    assert sorted(INDEX) == [*range(1, 25)]


@pytest.mark.parametrize("number", sorted(INDEX))
def test_its_tests_exist_and_ours_name_the_source(number: int) -> None:
    for test in INDEX[number]:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        found = re.search(rf"def {name}\(.*?\n(?:    .*\n|\).*\n)+", text)
        assert found, test
        if "complaints" in path:
            assert PUBLIC_SOURCE.search(found[0]), f"{test} does not say whose complaint it is"
