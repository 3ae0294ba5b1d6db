"""The same promises where a server cannot keep calls in its queue while it takes weights, as old ones: calls
are ended at the server and sent again."""

import pytest

from tests.cell.engine.test_contract import (
    test_calls_answer_whatever_is_asked_of_the_engine_meanwhile,
    test_update_reaches_waiting_calls_too,
    test_update_under_a_call_labels_each_token_with_its_version,
)
from tests.cell.engine.test_contract_pause import *  # noqa: F403

__all__ = [
    "test_calls_answer_whatever_is_asked_of_the_engine_meanwhile",
    "test_update_reaches_waiting_calls_too",
    "test_update_under_a_call_labels_each_token_with_its_version",
]


@pytest.fixture(autouse=True)
def _older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.cell.engine.sglang_link.requeues", lambda version: False)
