from __future__ import annotations

from msgspec.structs import replace

from gyre.trajectory.rows import decode_call, encode_call
from tests.trajectory.trees import calls_tool, record, user


def test_a_call_comes_back_as_it_was() -> None:
    call = replace(
        record("c1", "c0", new=[1, 2**31 - 1], out=[5, 6], version=3, messages=[user("né")]),
        logprobs=(-0.1, -1e-30),
        output_message=calls_tool("put", folder="data"),
        tool_calls={"t1": "<tool_call>raw</tool_call>"},
        reroutes=2,
        moved_at=(0, 1),
        parsed_tool_calls=3,
        malformed_tool_calls=4,
        kv_versions=(2, 3),
    )
    assert decode_call(encode_call(call)) == call


def test_integers_beyond_64_bits_in_a_message_survive() -> None:
    call = record("c1", messages=[{"role": "user", "content": "x", "extra": 10**30}])
    assert decode_call(encode_call(call)).messages[0]["extra"] == 10**30


def test_what_is_stored_grows_with_new_content_only() -> None:
    def size(tokens: int) -> int:
        return len(encode_call(record("c1", "c0", new=[7] * tokens, out=[])))

    assert size(2000) - size(1000) <= 4 * 1000 + 8
