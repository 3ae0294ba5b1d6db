"""What the leading rank of an engine tells the others, as bytes. Passes may come a thousand times a second,
so they are flat numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gyre.cell.engine.base import KvPart
from gyre.cell.engine.paged import Piece
from gyre.rdma import RegionHandle

_PASS = b"\x00"
_OTHER = b"\x01"


class TakeWeights(msgspec.Struct, frozen=True, tag=True):
    """Take memory for this rank's part and fill it."""

    version: int
    region: RegionHandle


class TakeKv(msgspec.Struct, frozen=True, tag=True):
    """Take memory for the pool."""


class ReleaseKv(msgspec.Struct, frozen=True, tag=True):
    """Free it."""


class ReadKv(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's heads of the blocks into its region."""

    blocks: tuple[int, ...]
    region: RegionHandle


class WriteKv(msgspec.Struct, frozen=True, tag=True):
    """Fill this rank's heads of the blocks from those in `part`, from its block `first` on."""

    blocks: tuple[int, ...]
    part: KvPart
    first: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Free the weights; nothing more is computed together."""


Order = TakeWeights | TakeKv | ReleaseKv | ReadKv | WriteKv | Leave


class Done(msgspec.Struct, frozen=True):
    """An order is carried out, or why it could not be. `finite` is false where numbers to write are not. With
    `leaving` it answers nothing: the rank ends in order."""

    error: str | None = None
    finite: bool = True
    leaving: bool = False


@dataclass(slots=True, frozen=True)
class ToldPiece:
    """A `Piece` of a pass that another rank has planned."""

    start: int
    samples: bool
    table: list[int]
    ids: list[int]

    @property
    def count(self) -> int:
        return len(self.ids)


class BadOrder(ValueError):
    """Bytes that are no order."""


_orders = msgspec.msgpack.Decoder(Order)
_answers = msgspec.msgpack.Decoder(Done)


def pack(order: Order) -> bytes:
    return _OTHER + msgspec.msgpack.encode(order)


def pack_pass(spans: Sequence[Piece], block_tokens: int) -> bytes:
    numbers = array("i", (len(spans),))
    for span in spans:
        blocks = (span.start + span.count - 1) // block_tokens + 1
        numbers.extend((span.start, span.count, span.samples, blocks))
        numbers.fromlist(span.table[:blocks])
        numbers.fromlist(span.ids)
    return _PASS + numbers.tobytes()


def unpack(frame: bytes) -> Order | list[ToldPiece]:
    """The pieces of a pass, or another order. Raises BadOrder."""
    if frame[:1] == _PASS:
        return _pieces(frame)
    try:
        if frame[:1] == _OTHER:
            return _orders.decode(memoryview(frame)[1:])
    except msgspec.MsgspecError as error:
        raise BadOrder(str(error)) from None
    raise BadOrder(f"kind {frame[:1]!r} is not known")


def _pieces(frame: bytes) -> list[ToldPiece]:
    if len(frame) % 4 != 1:
        raise BadOrder(f"a pass of {len(frame)} bytes is cut short")
    numbers = memoryview(frame)[1:].cast("i").tolist()
    if not numbers:
        raise BadOrder("a pass is empty")
    found: list[ToldPiece] = []
    at = 1
    for _ in range(numbers[0]):
        if len(numbers) < at + 4:
            raise BadOrder(f"a pass of {numbers[0]} pieces ends in number {len(found)}")
        start, count, samples, blocks = numbers[at : at + 4]
        at += 4
        end = at + blocks + count
        if min(start, blocks - 1, count - 1) < 0 or end > len(numbers):
            raise BadOrder(f"piece {len(found)} of a pass has {blocks} blocks and {count} tokens")
        found.append(ToldPiece(start, bool(samples), numbers[at : at + blocks], numbers[at + blocks : end]))
        at = end
    if at != len(numbers):
        raise BadOrder(f"a pass of {numbers[0]} pieces has {len(numbers) - at} numbers more")
    return found


def pack_answer(answer: Done) -> bytes:
    return msgspec.msgpack.encode(answer)


def unpack_answer(frame: bytes) -> Done:
    """Raises BadOrder."""
    try:
        return _answers.decode(frame)
    except msgspec.MsgspecError as error:
        raise BadOrder(str(error)) from None
