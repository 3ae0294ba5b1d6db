from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.actors.handshake import (
    NONCE_BYTES,
    Crossed,
    DiallerHandshake,
    HandshakeFailed,
    ListenerHandshake,
    Peer,
    verdict,
)

TOKEN = b"t" * 32
NONCE_A, NONCE_B = b"a" * NONCE_BYTES, b"b" * NONCE_BYTES
A, B = Peer("a" * 16, "a", "unix:/a"), Peer("b" * 16, "b", "unix:/b")


def pair(theirs: bytes = TOKEN) -> tuple[DiallerHandshake, ListenerHandshake]:
    return DiallerHandshake(TOKEN, A, NONCE_A), ListenerHandshake(theirs, B, NONCE_B)


def test_both_prove_themselves_and_know_each_other() -> None:
    dialler, listener = pair()
    listener.on_proof(
        memoryview(dialler.on_hello(memoryview(listener.on_hello(memoryview(dialler.hello())))))
    )
    dialler.on_verdict(memoryview(verdict("welcome")))
    assert dialler.peer == B
    assert listener.peer == A


def test_the_dialler_refuses_a_listener_with_another_token() -> None:
    dialler, listener = pair(b"x" * 32)
    with pytest.raises(HandshakeFailed, match="wrong token"):
        dialler.on_hello(memoryview(listener.on_hello(memoryview(dialler.hello()))))


def test_the_listener_refuses_a_dialler_with_another_token() -> None:
    impostor, _ = pair()
    honest = ListenerHandshake(b"x" * 32, B, NONCE_B)
    impostor._token = TOKEN
    answer = honest.on_hello(memoryview(impostor.hello()))
    impostor._check = lambda side, proof: None  # type: ignore[method-assign]
    with pytest.raises(HandshakeFailed, match="wrong token"):
        honest.on_proof(memoryview(impostor.on_hello(memoryview(answer))))


def test_a_proof_cannot_be_reflected() -> None:
    """The listener's own proof, sent back by one who has no token."""
    _, listener = pair()
    dialler = DiallerHandshake(b"?" * 32, A, NONCE_A)
    answer = listener.on_hello(memoryview(dialler.hello()))
    import msgspec

    reflected = msgspec.msgpack.decode(answer)[-1]
    with pytest.raises(HandshakeFailed, match="wrong token"):
        listener.on_proof(memoryview(msgspec.msgpack.encode(["proof", reflected])))


def test_a_proof_cannot_be_replayed() -> None:
    dialler, listener = pair()
    hello = dialler.hello()
    proof = dialler.on_hello(memoryview(listener.on_hello(memoryview(hello))))
    again = ListenerHandshake(TOKEN, B, b"c" * NONCE_BYTES)
    again.on_hello(memoryview(hello))
    with pytest.raises(HandshakeFailed, match="wrong token"):
        again.on_proof(memoryview(proof))


def test_a_refusal_says_why() -> None:
    dialler, _ = pair()
    with pytest.raises(HandshakeFailed, match="refused: wrong token"):
        dialler.on_hello(memoryview(verdict("refused", "wrong token")))


def test_crossed_is_an_error_of_its_own() -> None:
    dialler, _ = pair()
    with pytest.raises(Crossed):
        dialler.on_verdict(memoryview(verdict("crossed")))


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    _, listener = pair()
    with pytest.raises(HandshakeFailed):
        listener.on_hello(memoryview(garbage))
