"""How two nodes prove to each other that they hold the same token, and agree on one connection."""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal, NamedTuple

import msgspec

from gyre.actors.errors import LinkLost

PROTOCOL = "gyre-actors-1"
MAX_HANDSHAKE_BYTES = 4096
NONCE_BYTES = 32


class Peer(NamedTuple):
    """Who is at the other end."""

    node_id: str
    name: str
    endpoint: str


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First words of both. `session`: of a bulk connection, the nonce with which the dialler opened the one
    for control that it belongs to."""

    protocol: str
    peer: Peer
    nonce: bytes
    proof: bytes = b""
    session: bytes = b""


class Proof(msgspec.Struct, array_like=True, tag="proof"):
    """The dialler's answer."""

    proof: bytes


class Verdict(msgspec.Struct, array_like=True, tag="verdict"):
    """The listener's last word. `crossed`: both dialled at once, and the other connection stays."""

    verdict: Literal["welcome", "crossed", "refused"]
    why: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Hello | Proof | Verdict)


class HandshakeFailed(LinkLost):
    """The other end is not one of ours, or does not behave."""


class Crossed(LinkLost):
    """The connection that the peer makes is the one that stays."""


def _read(payload: memoryview, expected: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        words = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise HandshakeFailed(f"not a handshake: {error}") from error
    if isinstance(words, Verdict) and words.verdict == "refused":
        raise HandshakeFailed(f"refused: {words.why}")
    if isinstance(words, Verdict) and words.verdict == "crossed":
        raise Crossed("another connection to that peer stays")
    if not isinstance(words, expected):
        raise HandshakeFailed(f"a {type(words).__name__} where a {expected.__name__} belongs")
    return words


def _proof(token: bytes, side: str, mine: Hello, theirs: Hello) -> bytes:
    # Both hellos are under the mac, so neither names nor endpoints can be changed on the way.
    claims = _encode([side, mine.peer, mine.nonce, mine.session, theirs.peer, theirs.nonce, theirs.session])
    return hmac.digest(token, claims, hashlib.sha256)


class _Side:
    def __init__(self, token: bytes, me: Peer, nonce: bytes, session: bytes = b"") -> None:
        """`nonce`: NONCE_BYTES at random."""
        self._token = token
        self._mine = Hello(PROTOCOL, me, nonce, session=session)
        self._theirs: Hello | None = None

    @property
    def peer(self) -> Peer:
        assert self._theirs is not None
        return self._theirs.peer

    @property
    def theirs(self) -> Hello:
        assert self._theirs is not None
        return self._theirs

    def _meet(self, theirs: Hello) -> None:
        if theirs.protocol != PROTOCOL:
            raise HandshakeFailed(f"it speaks {theirs.protocol!r}, not {PROTOCOL!r}")
        if len(theirs.nonce) != NONCE_BYTES or theirs.nonce == self._mine.nonce:
            raise HandshakeFailed("bad nonce")
        self._theirs = theirs

    def _prove(self, side: str) -> bytes:
        assert self._theirs is not None
        return _proof(self._token, side, self._mine, self._theirs)

    def _check(self, side: str, proof: bytes) -> None:
        assert self._theirs is not None
        if not hmac.compare_digest(proof, _proof(self._token, side, self._theirs, self._mine)):
            raise HandshakeFailed("wrong token")


class DiallerHandshake(_Side):
    """hello -> (hello with proof) -> proof -> (verdict)"""

    def hello(self) -> bytes:
        return _encode(self._mine)

    def on_hello(self, payload: memoryview) -> bytes:
        """The listener has proved itself; the proof to send."""
        theirs = _read(payload, Hello)
        assert isinstance(theirs, Hello)
        self._meet(theirs)
        self._check("listener", theirs.proof)
        return _encode(Proof(self._prove("dialler")))

    def on_verdict(self, payload: memoryview) -> None:
        """Returns when welcome; raises Crossed, HandshakeFailed."""
        _read(payload, Verdict)


class ListenerHandshake(_Side):
    """(hello) -> hello with proof -> (proof) -> verdict"""

    def on_hello(self, payload: memoryview) -> bytes:
        theirs = _read(payload, Hello)
        assert isinstance(theirs, Hello)
        self._meet(theirs)
        proof = self._prove("listener")
        return _encode(Hello(PROTOCOL, self._mine.peer, self._mine.nonce, proof))

    def on_proof(self, payload: memoryview) -> None:
        """Returns when the dialler has proved itself; HandshakeFailed, or Crossed where it needs no other."""
        words = _read(payload, Proof)
        assert isinstance(words, Proof)
        self._check("dialler", words.proof)


def verdict(word: Literal["welcome", "crossed", "refused"], why: str = "") -> bytes:
    return _encode(Verdict(word, why))
