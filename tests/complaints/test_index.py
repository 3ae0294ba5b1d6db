"""Each complaint has its tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.complaints import COMPLAINTS, HARNESSES, Complaint

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("complaint", [*COMPLAINTS, *HARNESSES], ids=lambda its: its.source)
def test_its_tests_exist(complaint: Complaint) -> None:
    assert complaint.tests
    for test in complaint.tests:
        path, _, name = test.partition("::")
        found = re.findall(r"def (test_\w+)\(", (ROOT / path).read_text())
        assert name in found or (name == "*" and found), test
