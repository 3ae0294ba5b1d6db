from __future__ import annotations

import msgspec
import pytest

from gyre.proxy.codec import Codec
from gyre.proxy.restoring import answered
from tests.trajectory.trees import record

GOOD = '<tool_call>{"name": "put", "arguments": {"folder":  "data"}}</tool_call>'
BROKEN = '<tool_call>{"name": "put", "arguments": {"folder": "da'


@pytest.mark.parametrize(
    "text", ["Done.", "", f"<think>Where?</think>I file it.\n{GOOD}", f"{GOOD}{GOOD}", BROKEN, "<tool_call>"]
)
def test_an_answer_is_what_it_was_in_the_life_that_recorded_it(codec: Codec, text: str) -> None:
    decoded = codec.decode_answer(codec._encode(text), "g000001.00-0-0000")
    recorded = record("a", output=decoded.message.to_openai())
    recorded = msgspec.structs.replace(recorded, tool_calls=decoded.raw_calls)
    assert answered(recorded) == decoded.message
