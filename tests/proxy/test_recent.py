"""What is kept of a conversation changes nothing but how long its next call takes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.proxy.conversation import Conversation, Message, ToolCall
from gyre.proxy.matching import ConversationIndex
from gyre.proxy.recent import RecentDigests, WarmPaths
from tests.proxy.house import PUT

WORDS = ("next", "next: box", "", "filed")
# For Python these are equal.
ONES = st.sampled_from((True, 1, 1.0))
CALLS = st.builds(
    ToolCall, id=st.just("call-1"), name=st.just("put"), arguments=st.fixed_dictionaries({"on": ONES})
)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(("user", "assistant", "tool")),
    content=st.lists(st.sampled_from(WORDS), max_size=2).map(tuple),
    tool_calls=st.lists(CALLS, max_size=1).map(tuple),
)
TOOLS = st.none() | ONES


def conversation(messages: list[Message], default: float | None) -> Conversation:
    tools = () if default is None else (dict[str, Any](PUT) | {"default": default},)
    return Conversation(messages=tuple(messages), tools=tools)


@settings(max_examples=80, deadline=None)
@given(
    asked=st.lists(st.tuples(st.lists(MESSAGES, min_size=1, max_size=6), TOOLS), max_size=8),
    last=st.lists(MESSAGES, min_size=1, max_size=8),
)
def test_digests_are_the_same_whatever_was_asked_before(
    asked: list[tuple[list[Message], float | None]], last: list[Message]
) -> None:
    index = ConversationIndex()
    for messages, tools in asked:
        for other in (messages, messages + last[:2]):
            assert index.digests(conversation(other, tools)) == ConversationIndex().digests(
                conversation(other, tools)
            )
    assert index.digests(conversation(last, 1)) == ConversationIndex().digests(conversation(last, 1))


def test_a_conversation_that_goes_on_begins_with_what_it_was() -> None:
    recent = RecentDigests()
    one, two = (Message(role="user", content=(text,)) for text in ("one", "two"))
    recent.keep((), (one, two), [b"tools", b"1", b"2"])
    again = Conversation(messages=(Message(role="user", content=("one",)), two, one))
    messages, chain = recent.beginning(again)
    # Without the last that is shared: what follows it is new.
    assert chain == [b"tools", b"1"] and messages[0] is one
    assert recent.beginning(Conversation(messages=(two,))) == ((), [b"tools"])
    assert recent.beginning(Conversation(messages=(one,), tools=(PUT,))) == ((), [])


def test_a_path_is_the_same_warm_or_not() -> None:
    cold, warm_index = ConversationIndex(), ConversationIndex(warm := WarmPaths(most_tokens=8))
    answer = Message(role="assistant", content=("filed",))
    for index in (cold, warm_index):
        index.add("a", parent=None, digest=b"a", answer=answer, new_input_ids=[1, 2], output_ids=[3])
        index.add("b", parent="a", digest=b"b", answer=answer, new_input_ids=[4], output_ids=[5])
    warm.keep("a", None, (1, 2), [3])
    assert warm_index.prompt_ids("a", [4]) == cold.prompt_ids("a", [4]) == (1, 2, 3, 4)
    warm.keep("b", "a", (1, 2, 3, 4), [5])
    assert warm.path("a") is None
    assert warm_index.prompt_ids("b", [6]) == cold.prompt_ids("b", [6]) == (1, 2, 3, 4, 5, 6)
    # There is room for 8: the next ones take it from those that were kept first.
    warm.keep("c", None, (7, 8, 9), [1])
    assert warm.path("b") is None and warm.path("c") == ((7, 8, 9), (1,))
    warm.keep("d", None, tuple(range(9)), [])
    assert warm.path("c") is None and warm.path("d") is None
