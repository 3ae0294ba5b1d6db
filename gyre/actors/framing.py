"""Frames on a byte stream: four bytes of length, big-endian, then so many bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

_LENGTH = struct.Struct(">I")


class FrameTooLong(ValueError):
    """A frame over the bound."""

    def __init__(self, length_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"a frame of {length_bytes} bytes, {limit_bytes} allowed")
        self.length_bytes = length_bytes
        self.limit_bytes = limit_bytes


# The header of a frame of so many bytes.
header: Callable[[int], bytes] = _LENGTH.pack


class Unframer:
    """Cuts what arrives into frames. A frame that lies whole in one chunk is a view of that chunk, so it
    must be read before the next is asked for and not kept."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._rest = bytearray()

    @property
    def truncated(self) -> bool:
        """Whether the stream would end within a frame here."""
        return bool(self._rest)

    def feed(self, chunk: bytes | memoryview) -> Iterator[memoryview]:
        """The frames that are complete with `chunk`. Raises FrameTooLong as soon as a length says so."""
        view = memoryview(chunk)
        if self._rest:
            self._rest += view
            view = memoryview(self._rest)
        at, size = 0, len(view)
        while size - at >= 4:
            (length,) = _LENGTH.unpack_from(view, at)
            if length > self.limit_bytes:
                raise FrameTooLong(length, self.limit_bytes)
            end = at + 4 + length
            if end > size:
                break
            yield view[at + 4 : end]
            at = end
        if at < size or self._rest:
            self._rest = bytearray(view[at:])

    def whole(self, chunk: bytes) -> memoryview | None:
        """The frame that `chunk` is, where it is one and no more, and nothing came before: as good as `feed`,
        in a fraction of its time."""
        if self._rest or len(chunk) < 4:
            return None
        (length,) = _LENGTH.unpack_from(chunk)
        if length + 4 != len(chunk) or length > self.limit_bytes:
            return None
        return memoryview(chunk)[4:]
