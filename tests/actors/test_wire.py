from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.actors import BadMessage, ExitReason, Ref
from gyre.actors.envelope import Waiter
from gyre.actors.errors import Failure
from gyre.actors.wire import Codec, Deadlock, Demand, Failed, Gone, Reply, Request, Seek, Tie
from tests.actors.zoo import Cat, CounterConfig, Dog


class _Target:
    """Bound Refs of these tests lead nowhere."""


def bind(node_id: str, endpoint: str, id: int, name: str, incarnation: int) -> Ref:
    return Ref(node_id, endpoint, id, name, incarnation, _Target())  # type: ignore[arg-type]


CODEC = Codec("here", lambda: "unix:/here", bind)
REF = bind("there", "tcp:1.2.3.4:5", 7, "cat", 3)


def carry(value: Any, type: Any) -> Any:
    return CODEC.decode(type, msgspec.Raw(CODEC.encode(value)))


@pytest.mark.parametrize(
    ("value", "type"),
    [
        (None, None),
        (7, int),
        (b"\0\xff", bytes),
        ((1, 2), tuple[int, ...]),
        ({"a": (1.5,)}, dict[str, tuple[float, ...]]),
        (Path("/a/b"), Path),
        (REF, Ref),
        ((REF, REF), tuple[Ref, ...]),
        (None, Ref | None),
        (Cat(lives=2, owner=REF), Cat | Dog | None),
        (Dog(name="x"), Cat | Dog | None),
        (CounterConfig(start=1, peer=REF, folder=Path("x")), CounterConfig),
    ],
)
def test_values_survive_the_wire(value: Any, type: Any) -> None:
    assert carry(value, type) == value


def test_a_ref_keeps_where_it_is() -> None:
    got = carry(REF, Ref)
    assert (got.endpoint, got.name, got.incarnation) == ("tcp:1.2.3.4:5", "cat", 3)


def test_a_ref_of_this_node_travels_with_its_endpoint() -> None:
    assert carry(bind("here", "", 1, "x", 1), Ref).endpoint == "unix:/here"


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(BadMessage, match=r"CounterConfig cannot be encoded: a object cannot travel"):
        CODEC.encode(CounterConfig(folder=object()))  # type: ignore[arg-type]


def test_what_does_not_fit_its_type_is_named() -> None:
    with pytest.raises(
        BadMessage, match=r"this is no CounterConfig: Expected `int`, got `str` - at `\$.start`"
    ):
        CODEC.decode(CounterConfig, msgspec.Raw(msgspec.msgpack.encode({"start": "x"})))


@pytest.mark.parametrize("junk", [None, 1, "x", [], ["a", "b"], [1, 2, "x", 4, 5]])
def test_a_bad_ref_is_a_bad_message(junk: Any) -> None:
    with pytest.raises(BadMessage):
        CODEC.decode(Ref, msgspec.Raw(msgspec.msgpack.encode(junk)))


@given(st.binary(max_size=100))
def test_garbage_is_a_bad_message(garbage: bytes) -> None:
    try:
        CODEC.frame(memoryview(garbage))
    except BadMessage:
        return
    assert garbage


@given(
    st.integers(0, 2), st.integers(0, 2**62), st.text(max_size=20), st.binary(max_size=50), st.floats(0, 1e6)
)
def test_a_request_survives_the_wire(kind: int, id: int, name: str, body: bytes, left_s: float) -> None:
    sent = Request(1, kind, id, 2, 3, 4, left_s, 5, 6, (("n", 1, 2, "l"),), name, body)  # type: ignore[arg-type]
    got = CODEC.frame(memoryview(CODEC.encode(sent)))
    assert isinstance(got, Request)
    assert CODEC.decode(bytes, got.body) == body
    assert (got.kind, got.id, got.left_s, got.type) == (kind, id, left_s, name)
    assert got.chain[0].message_id == 2


@pytest.mark.parametrize(
    "frame",
    [
        Reply(1, 2, msgspec.Raw(b"\x03")),
        Failed(1, 2, Failure(type_name="x", args=[1], fields={"a": None})),
        Demand(1, 2, 3),
        Gone(1, 2, ExitReason(kind="exit", exit_code=3, stderr_tail=("a",))),
        Tie(1, 2, 3, "far", 1, True),
        Seek(1, 2, 3, 4, (Waiter("n", 1, 2, "l"),), ("l",), ("n",)),
        Deadlock(1, 2, 3, ("n",), ("l", "l")),
    ],
)
def test_frames_survive_the_wire(frame: Any) -> None:
    assert CODEC.frame(memoryview(CODEC.encode(frame))) == frame
