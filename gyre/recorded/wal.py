"""Whether SQLite's write-ahead log ends in a write that was cut short: it is passed over without a word."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO

_HEADER = struct.Struct(">IIIIIIII")
_FRAME = struct.Struct(">IIIIII")
_MAGIC = 0x377F0682


def torn_bytes(wal: Path) -> int:
    """How many bytes follow the last whole transaction in the log `wal` and belong to no older use of the
    file: 0 where its end is whole, or there is none. Raises OSError."""
    try:
        with wal.open("rb") as file:
            return _torn(file)
    except FileNotFoundError:
        return 0


def _torn(file: IO[bytes]) -> int:
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        return len(head)
    magic, _, page_bytes, *_, sum0, sum1 = _HEADER.unpack(head)
    order = ">" if magic & 1 else "<"
    if magic & ~1 != _MAGIC or _checksum(head[:24], order, 0, 0) != (sum0, sum1):
        return 0  # never used since it was made or reset: all is in the database
    sums, torn = (sum0, sum1), 0
    while frame := file.read(_FRAME.size + page_bytes):
        if len(frame) >= 16 and frame[8:16] != head[16:24]:
            break  # left over from an earlier use
        torn += len(frame)
        if len(frame) < _FRAME.size + page_bytes:
            break
        _, committed, *_, sum0, sum1 = _FRAME.unpack_from(frame)
        sums = _checksum(frame[:8] + frame[_FRAME.size :], order, *sums)
        if sums != (sum0, sum1):
            break
        if committed:
            torn = 0
    return torn


def _checksum(data: bytes, order: str, first: int, second: int) -> tuple[int, int]:
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second
