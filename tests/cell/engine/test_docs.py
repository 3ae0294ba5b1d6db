from __future__ import annotations

from pathlib import Path

import pytest

from tests.cell.engine.conftest import NativeCase, ScriptedCase
from tests.sglang.conftest import SglangCase

DOCUMENT = Path(__file__).parents[3] / "docs" / "engines.md"


@pytest.mark.parametrize("case", [NativeCase, ScriptedCase, SglangCase])
def test_what_an_engine_lacks_is_documented_with_the_reason(case: type) -> None:
    text = DOCUMENT.read_text()
    for feature, reason in case.lacks.items():  # type: ignore[attr-defined]
        assert f"| no: {reason}" in text, feature
