"""What the two ends of a lane say to each other: a frame is a length and one of these."""

from __future__ import annotations

import struct

import msgspec

from gyre.rdma.base import Op

MAX_FRAME_BYTES = 4 * 2**20
# Of one request; an operation has as many requests as it needs.
MAX_PIECES = 16 * 1024
MAX_NOTE_BYTES = 2**20
MAX_TIMEOUT_S = 1e6

LENGTH = struct.Struct(">I")


class BadFrame(ValueError):
    """The other end does not speak as it should."""


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """Asks for bytes of a region: `pieces` are (offset, bytes)."""

    op: Op
    name: str
    key: bytes
    nbytes: int
    pieces: list[tuple[int, int]]
    timeout_s: float
    hint: bytes = b""


class Tell(msgspec.Struct, array_like=True, tag="tell"):
    """A notification."""

    message: bytes


class Go(msgspec.Struct, array_like=True, tag="go"):
    """What was begun may go on. `grant`: what the backend needs for it."""

    grant: bytes = b""


class Done(msgspec.Struct, array_like=True, tag="done"):
    """It is over, here."""


class No(msgspec.Struct, array_like=True, tag="no"):
    """It is refused, or has failed here."""

    reason: str


class Hold(msgspec.Struct, array_like=True, tag="hold"):
    """Who says this keeps mapped what it is granted, until it is told to `Drop` it."""


class Drop(msgspec.Struct, array_like=True, tag="drop"):
    """That allocation is about to go: `Done` when it is not mapped any more."""

    allocation: bytes


Frame = Begin | Tell | Go | Done | No | Hold | Drop

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """With its length."""
    payload = _encoder.encode(frame)
    return LENGTH.pack(len(payload)) + payload


def length(header: bytes | bytearray) -> int:
    """Of the frame that follows. Raises BadFrame."""
    (nbytes,) = LENGTH.unpack(header)
    if not 0 < nbytes <= MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {nbytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return int(nbytes)


def decode(payload: bytes | bytearray) -> Frame:
    """Raises BadFrame."""
    try:
        frame = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a frame: {error}") from error
    if isinstance(frame, Begin):
        _check(frame)
    if isinstance(frame, Tell) and len(frame.message) > MAX_NOTE_BYTES:
        raise BadFrame(f"a notification of {len(frame.message)} bytes")
    return frame


def _check(begin: Begin) -> None:
    if not 0 < len(begin.pieces) <= MAX_PIECES:
        raise BadFrame(f"{len(begin.pieces)} pieces; 1 to {MAX_PIECES} are allowed")
    for offset, nbytes in begin.pieces:
        if offset < 0 or nbytes <= 0 or offset + nbytes > begin.nbytes:
            raise BadFrame(f"{nbytes} bytes at {offset} of a region of {begin.nbytes}")
    if not 0 < begin.timeout_s < MAX_TIMEOUT_S:
        raise BadFrame(f"a time-out of {begin.timeout_s} s")
