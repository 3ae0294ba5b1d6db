from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.proxy import OpenExecution
from gyre.proxy.compactions import Compactions
from gyre.proxy.conversation import CallError, Conversation, Message, MessageRole
from gyre.proxy.messages import CompactionLimit
from tests.proxy.house import USER, house

WORDS = ("WRITE A SUMMARY",)
ASKS: Any = {"role": "user", "content": "Now WRITE A SUMMARY of it."}


def said(*pairs: tuple[MessageRole, str]) -> Conversation:
    return Conversation(messages=tuple(Message(role=role, content=(text,)) for role, text in pairs))


def refused(compactions: Compactions, conversation: Conversation) -> bool:
    try:
        compactions.admit(conversation)
    except CallError as error:
        assert (error.status, error.code) == (400, "too_many_compactions")
        return True
    return False


@pytest.mark.parametrize(
    "asks",
    [
        said(("system", "You are the one to WRITE A SUMMARY."), ("user", "all of it")),
        said(("system", "You code."), ("user", "go on"), ("user", "WRITE A SUMMARY")),
    ],
)
def test_one_summary_too_many_ends_the_execution(asks: Conversation) -> None:
    goes_on = said(("system", "You code."), ("user", "go on"))
    compactions = Compactions("g000001.00", CompactionLimit(most=2, words=WORDS))
    for _ in range(2):
        assert not refused(compactions, asks)
        compactions.recorded(asks)
        assert not refused(compactions, goes_on)
        compactions.recorded(goes_on)
    assert refused(compactions, asks)
    assert refused(compactions, goes_on)


def test_words_that_a_tool_or_an_earlier_message_says_are_none_of_a_summary() -> None:
    compactions = Compactions("g000001.00", CompactionLimit(most=0, words=WORDS))
    assert not refused(compactions, said(("system", "You code."), ("tool", "grep: WRITE A SUMMARY")))
    assert not refused(compactions, said(("user", "WRITE A SUMMARY"), ("assistant", "x"), ("user", "on")))
    assert not refused(compactions, said())


def test_a_summary_that_failed_is_not_counted() -> None:
    asks = said(("user", "WRITE A SUMMARY"))
    compactions = Compactions("g000001.00", CompactionLimit(most=1, words=WORDS))
    assert [refused(compactions, asks) for _ in range(5)] == [False] * 5


@given(st.lists(st.booleans()), st.integers(0, 4))
def test_so_many_are_answered_and_none_after_the_end(calls: list[bool], most: int) -> None:
    compactions = Compactions("g000001.00", CompactionLimit(most=most, words=WORDS))
    unlimited = Compactions("g000001.00", None)
    answered = []
    for is_summary in calls:
        conversation = said(("user", WORDS[0] if is_summary else "go on"))
        assert not refused(unlimited, conversation)
        if not refused(compactions, conversation):
            compactions.recorded(conversation)
            answered.append(is_summary)
    assert answered.count(True) == min(most, calls.count(True))
    assert answered == calls[: len(answered)]


async def test_a_harness_that_compacts_for_ever_is_told_the_end(chatml_folder: Path, tmp_path: Path) -> None:
    async with house(chatml_folder, tmp_path) as one:
        limit = CompactionLimit(most=1, words=WORDS)
        name = "g000002.00"
        opening = OpenExecution(execution=name, attempt=1, compactions=limit)
        one.access[name] = await one.proxy.ask(opening)
        await one.chat(USER, execution=name)
        await one.chat(ASKS, execution=name)
        for messages in ([ASKS], [USER]):
            status, answer = await one.post({"messages": messages}, name)
            assert (status, answer["error"]["code"]) == (400, "too_many_compactions")
        # Nobody else is concerned.
        await one.chat(ASKS)
        await one.chat(ASKS)
        assert (await one.totals()).calls == 4
