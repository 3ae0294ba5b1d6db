"""The checksum of copies."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.rdma import page_sum
from gyre.rdma.page_sums import PAGE_BYTES, PART_BYTES, checksum_of, sums_of

DATA = os.urandom(5 * PAGE_BYTES + 17)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(0, 7), st.integers(0, len(DATA)))
def test_each_bit_and_the_length_count(at: int, bit: int, nbytes: int) -> None:
    changed = bytearray(DATA)
    changed[at] ^= 1 << bit
    assert page_sum(memoryview(changed)) != page_sum(memoryview(DATA))
    assert (page_sum(memoryview(DATA[:nbytes])) == page_sum(memoryview(DATA))) is (nbytes == len(DATA))


def test_pages_in_another_order_or_of_something_else_are_other_bytes() -> None:
    pages = [DATA[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(5)]
    found = {page_sum(memoryview(b"".join(order))) for order in (pages, pages[::-1], [*pages[:4], pages[0]])}
    assert len(found) == 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=4), st.integers(0, 2 * PAGE_BYTES))
def test_parts_count_as_the_whole(pages: list[int], rest: int) -> None:
    parts = [os.urandom(count * PAGE_BYTES) for count in pages] + [os.urandom(rest)]
    found = checksum_of(sums_of(memoryview(part)) for part in parts)
    assert found == page_sum(memoryview(b"".join(parts)))


def test_it_does_not_matter_how_much_is_summed_at_once() -> None:
    data = memoryview(os.urandom(2 * PART_BYTES + PAGE_BYTES + 3))
    by_page = [sums_of(data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES)]
    assert checksum_of(by_page) == checksum_of([sums_of(data)]) == page_sum(data)
