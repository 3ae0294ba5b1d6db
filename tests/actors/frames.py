"""Frames of a peer that means no good, or is broken: valid ones, and what chance makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import inf, nan

import msgspec

from gyre.actors.envelope import Waiter
from gyre.actors.errors import ExitReason, Failure
from gyre.actors.framing import header
from gyre.actors.wire import (
    Beat,
    Booted,
    Cancel,
    Codec,
    Demand,
    End,
    Ended,
    Failed,
    Frame,
    Gone,
    Item,
    Reply,
    Request,
    Shutdown,
    Taken,
    Tie,
    Watch,
)

INTS = (0, 1, 2, 3, 7, -1, 255, 65536, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
TIMES = (None, 0.0, 1.0, 30.0, -1.0, 1e-9, 1e300, inf, -inf, nan)
TEXTS = ("", "x", "tests.actors.zoo:Add", "é\0\n\x1b[31m", "y" * 5000, "builtins:ValueError")
# Heads of strings, bytes, arrays and maps that promise far more than follows.
HUGE = (
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\x00\x10\x00\x00",
)
NESTED = (b"\x91" * 5000 + b"\xc0", b"\x81\xa1x" * 3000 + b"\xc0", b"\x91" * 90 + b"\xc0")


class Nonsense:
    """Draws frames. `names` are of messages, `bodies` theirs, `targets` the ids of actors."""

    def __init__(
        self, rng: random.Random, codec: Codec, names: Sequence[str], bodies: Sequence[bytes]
    ) -> None:
        self.rng = rng
        self.codec = codec
        self.targets: Sequence[int] = (1,)
        self._names = (*names, *TEXTS)
        self._bodies = (*bodies, *(msgspec.msgpack.encode(value) for value in (None, 1, [], {}, "x" * 3000)))
        self._kinds: tuple[Callable[[int], Frame], ...] = (
            *[self._request] * 8,
            lambda seq: Reply(seq, self._int(), self._body()),
            lambda seq: Failed(seq, self._int(), self._failure()),
            lambda seq: Item(seq, self._int(), self._int(), self._body()),
            lambda seq: End(seq, self._int()),
            lambda seq: Cancel(seq, self._int()),
            lambda seq: Taken(seq, self._target(), self._int()),
            lambda seq: Demand(seq, self._int(), self._int()),
            lambda seq: Watch(seq, self._target(), rng.random() < 0.7),
            lambda seq: Gone(seq, self._target(), self._reason()),
            lambda seq: Booted(seq, self._int(), self._text(), self._reason()),
            lambda seq: Ended(seq, self._reason()),
            Shutdown,
            Beat,
            lambda seq: Tie(seq, self._target(), self._int(), self._text(), self._int(), rng.random() < 0.5),
        )

    def well_formed(self, seq: int) -> bytes:
        """Right in form, its fields at random: swapped, out of range, of another message, of nobody."""
        return self.codec.encode(self.rng.choice(self._kinds)(seq))

    def mutated(self, seq: int) -> bytes:
        """A frame of which some bytes were changed, cut, doubled or made to promise too much."""
        rng = self.rng
        data = bytearray(self.well_formed(seq))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(7):
                case 0 | 1 if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
                case 2:
                    del data[at:]
                case 3:
                    data[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 4:
                    data[at : at + 1] = rng.choice(HUGE)
                case 5:
                    data[at : at + 1] = rng.choice(NESTED)
                case 6:
                    other = rng.randrange(len(data) + 1)
                    data[at:at] = data[min(at, other) : max(at, other)]
        return bytes(data)

    def ends_the_link(self, payload: bytes, seq: int) -> bool:
        """Whether it will be known for nonsense."""
        try:
            return self.codec.frame(memoryview(payload)).seq != seq
        except Exception:
            return True

    def lie(self, payload: bytes) -> bytes:
        """On the wire, with a length that is not its own."""
        rng = self.rng
        length = rng.choice((0, 1, len(payload) - 1, len(payload) + 1, 2**26, 2**26 + 1, 2**31, 2**32 - 1))
        return header(max(length, 0)) + payload

    def _request(self, seq: int) -> Frame:
        rng = self.rng
        chain = tuple(
            Waiter(self._text(), self._int(), self._int(), self._text())
            for _ in range(rng.choice((0, 0, 0, 0, 1, 9)))
        )
        return Request(
            seq,
            rng.choice((0, 1, 2, 0, 1, 2, 3, -1)),
            self._int(),
            self._target(),
            self._int(),
            self._int(),
            rng.choice(TIMES),
            self._int(),
            rng.choice((0, 1, 5)),
            chain,
            rng.choice(self._names),
            self._body(),
        )

    def _int(self) -> int:
        return self.rng.choice(INTS)

    def _target(self) -> int:
        return self.rng.choice(self.targets) if self.rng.random() < 0.8 else self._int()

    def _text(self) -> str:
        return self.rng.choice(self._names)

    def _body(self) -> msgspec.Raw:
        return msgspec.Raw(self.rng.choice(self._bodies))

    def _reason(self) -> ExitReason:
        cause = self._reason() if self.rng.random() < 0.2 else None
        return ExitReason(kind="exit", message=self._text(), exit_code=self._int(), cause=cause)

    def _failure(self) -> Failure:
        reason = self._reason() if self.rng.random() < 0.3 else None
        return Failure(self._text(), self._text(), self._text(), [1, {}], {"x": 1}, reason)
