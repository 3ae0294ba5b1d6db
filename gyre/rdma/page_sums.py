"""A checksum as fast as memory: of bytes that were copied, to be sure that they are the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

PAGE_BYTES = 4096
_WORD_BYTES = 8
# Summed at once: in one call many pages, which stay in the cache.
PART_BYTES = 2**20


def sums_of(part: memoryview) -> bytes:
    """Of bytes that begin with a page: the sum of each page, then what there is of a last one. Lets other
    threads run."""
    import numpy as np  # slow to import, and few processes come here

    whole = len(part) // PAGE_BYTES * PAGE_BYTES
    pages = np.frombuffer(part[:whole], np.uint64).reshape(-1, PAGE_BYTES // _WORD_BYTES)
    sums: bytes = np.add.reduce(pages, axis=1).tobytes()
    return sums + part[whole:].tobytes()


def checksum_of(sums: Iterable[bytes]) -> int:
    """Of the whole, from those of all its parts in order."""
    checksum = 0
    for some in sums:
        checksum = zlib.crc32(some, checksum)
    return checksum


def page_sum(buffer: memoryview) -> int:
    """crc32 of the sums of all pages as 64-bit numbers. A bit that differs, a page that is missing, of
    another version or in another place changes it; numbers that changed places within a page do not. It takes
    half the time of a copy, where crc32 of all bytes takes four times that of a copy."""
    return checksum_of(sums_of(buffer[at : at + PART_BYTES]) for at in range(0, len(buffer), PART_BYTES))
