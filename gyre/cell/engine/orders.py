"""What the leading rank of an engine tells the others, as bytes. Passes may come a thousand times a second,
so they are flat numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from gyre.cell.engine.paged import Piece
from gyre.rdma import RegionHandle

_PASS = b"\x00"
_OTHER = b"\x01"


class TakeWeights(msgspec.Struct, frozen=True, tag=True):
    """Take memory for this rank's part and fill it."""

    version: int
    region: RegionHandle


class TakeKv(msgspec.Struct, frozen=True, tag=True):
    """Take memory for the pool; with `slot_bytes` it has a stage of such slots."""

    slot_bytes: int = 0


class FillSlot(msgspec.Struct, frozen=True, tag=True):
    """Put these blocks, packed, into a slot of the stage."""

    blocks: bytes
    slot: int


class AddUp(msgspec.Struct, frozen=True, tag=True):
    """Say the sums of these blocks, packed, or none where a number in them is not finite."""

    blocks: bytes


class TakeSlot(msgspec.Struct, frozen=True, tag=True):
    """Fill these blocks from as many of `heads` in the first bytes of a slot of the stage."""

    blocks: bytes
    heads: tuple[int, int]
    slot: int
    nbytes: int


class ReleaseKv(msgspec.Struct, frozen=True, tag=True):
    """Free it."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Free the weights; nothing more is computed together."""


Order = TakeWeights | TakeKv | FillSlot | AddUp | TakeSlot | ReleaseKv | Leave


class Done(msgspec.Struct, frozen=True):
    """An order is carried out, or why it could not be. `pool`: the region that this rank's part of the pool
    is, or its stage. `sums`: of blocks that it looked at or filled. With `leaving` it answers nothing: the
    rank ends in order."""

    error: str | None = None
    pool: RegionHandle | None = None
    leaving: bool = False
    sums: bytes = b""


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


class TellingPiece(Piece, Protocol):
    """`call` is no other piece's of the pass."""

    @property
    def call(self) -> str: ...


class PassWriter:
    """Passes as one leading rank tells them, one after the other. Most calls were in the pass before, with
    the same blocks and perhaps one more: only that is told, by a number for the call."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._told: dict[str, tuple[int, list[int]]] = {}
        self._numbers: list[int] = []
        self._most = 0

    def pack(self, spans: Sequence[TellingPiece]) -> bytes:
        numbers = array("i", (len(spans),))
        told: dict[str, tuple[int, list[int]]] = {}
        for span in spans:
            blocks = (span.start + span.count - 1) // self._block_tokens + 1
            number, table = self._told.pop(span.call, (0, []))
            number = number or self._number()
            if table and table != span.table[: min(len(table), blocks)]:
                table = []
            new = span.table[len(table) : blocks]
            numbers.extend((number, span.start, span.count, span.samples, len(table), len(new)))
            numbers.fromlist(new)
            numbers.fromlist(span.ids)
            told[span.call] = (number, table + new if new else table)
        self._numbers.extend(number for number, _ in self._told.values())
        self._told = told
        return _PASS + numbers.tobytes()

    def _number(self) -> int:
        if self._numbers:
            return self._numbers.pop()
        self._most += 1
        return self._most


class PassReader:
    """What a `PassWriter` wrote, in the same order."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def unpack(self, frame: bytes) -> list[ToldPiece]:
        """Raises BadOrder; then nothing more can be read."""
        if len(frame) % 4 != 1:
            raise BadOrder(f"a pass of {len(frame)} bytes is cut short")
        numbers = memoryview(frame)[1:].cast("i").tolist()
        if not numbers:
            raise BadOrder("a pass is empty")
        found: list[ToldPiece] = []
        tables: dict[int, list[int]] = {}
        at = 1
        for _ in range(numbers[0]):
            if len(numbers) < at + 6:
                raise BadOrder(f"a pass of {numbers[0]} pieces ends in number {len(found)}")
            call, start, count, samples, kept, new = numbers[at : at + 6]
            at += 6
            end = at + new + count
            table = self._tables.get(call, []) if kept else []
            if min(start, count - 1, kept, new) < 0 or end > len(numbers) or len(table) != kept:
                raise BadOrder(
                    f"piece {len(found)} has {count} tokens, {kept} blocks told before, {new} more"
                )
            table = tables[call] = table + numbers[at : at + new] if new else table
            found.append(ToldPiece(start, bool(samples), table, numbers[at + new : end]))
            at = end
        if at != len(numbers):
            raise BadOrder(f"a pass of {numbers[0]} pieces has {len(numbers) - at} numbers more")
        self._tables = tables
        return found


def pack(order: Order) -> bytes:
    return _OTHER + msgspec.msgpack.encode(order)


def is_pass(frame: bytes) -> bool:
    """For a `PassReader`, not `unpack`."""
    return frame[:1] == _PASS


def unpack(frame: bytes) -> Order:
    """Raises BadOrder."""
    if frame[:1] != _OTHER:
        raise BadOrder(f"kind {frame[:1]!r} is not known")
    try:
        return _orders.decode(memoryview(frame)[1:])
    except msgspec.MsgspecError as error:
        raise BadOrder(str(error)) from None


def pack_answer(answer: Done) -> bytes:
    return msgspec.msgpack.encode(answer)


def unpack_answer(frame: bytes) -> Done:
    """Raises BadOrder."""
    try:
        return _answers.decode(frame)
    except msgspec.MsgspecError as error:
        raise BadOrder(str(error)) from None
