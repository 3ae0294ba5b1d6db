from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre.cell.engine.base import pack_ids
from gyre.cell.engine.blocks import BlockPool, CachedBlock, chain_hash, root_hash

SIZE = 2
BLOCKS = 7


def seal_all(pool: BlockPool, tokens: list[int], version: int = 0) -> tuple[list[CachedBlock], list[int]]:
    """A sequence of full blocks, computed and sealed; its chain and digests' blocks."""
    digests: list[bytes] = []
    pool.extend_digests(digests, tokens, version)
    chain: list[CachedBlock] = []
    for index, digest in enumerate(digests):
        taken = pool.take(1)
        assert taken is not None
        parent = chain[-1] if chain else None
        entry = pool.seal(parent, digest, pack_ids(tokens[index * SIZE : (index + 1) * SIZE]), taken[0])
        assert entry is not None
        chain.append(entry)
    return chain, [entry.block for entry in chain]


def match(pool: BlockPool, tokens: list[int], version: int = 0) -> list[int]:
    return [entry.block for entry in pool.find([], tokens, version)]


def test_hashes_are_the_same_in_every_process() -> None:
    assert root_hash(3).hex() == "41d5b6299c810ff8ccff7d397c643c3c"
    assert chain_hash(root_hash(3), pack_ids([1, 2])).hex() == "662efcc991c1901672d4b48e14ac6bb1"


def test_a_sealed_chain_is_found_as_far_as_tokens_agree() -> None:
    pool = BlockPool(BLOCKS, SIZE)
    _, blocks = seal_all(pool, [1, 2, 3, 4, 5, 6])
    assert match(pool, [1, 2, 3, 4, 9, 9]) == blocks[:2]
    assert match(pool, [9, 2, 3, 4]) == []


def test_another_version_finds_nothing() -> None:
    pool = BlockPool(BLOCKS, SIZE)
    seal_all(pool, [1, 2], version=0)
    assert match(pool, [1, 2], version=1) == []


def test_equal_hashes_of_different_tokens_are_told_apart() -> None:
    pool = BlockPool(BLOCKS, SIZE, chain=lambda parent, tokens: b"same")
    chain, blocks = seal_all(pool, [1, 2])
    assert pool.find([], [3, 4], 0) == []
    taken = pool.take(1)
    assert taken is not None
    assert pool.seal(None, b"same", pack_ids([3, 4]), taken[0]) is None
    assert pool.find([], [1, 2], 0) == chain
    assert blocks != taken


def test_the_same_content_computed_twice_is_kept_once() -> None:
    pool = BlockPool(BLOCKS, SIZE)
    _, first = seal_all(pool, [1, 2, 3, 4])
    _, second = seal_all(pool, [1, 2, 3, 4])
    assert second == first
    assert pool.used == 2


def test_the_longest_unused_goes_first_and_children_before_parents() -> None:
    pool = BlockPool(4, SIZE)
    old, _ = seal_all(pool, [1, 2, 3, 4])
    new, _ = seal_all(pool, [5, 6])
    pool.let_go(old, [])
    pool.let_go(new, [])
    assert pool.take(2) is not None
    assert len(match(pool, [1, 2, 3, 4])) == 1
    assert len(match(pool, [5, 6])) == 1


def test_held_blocks_are_never_handed_out() -> None:
    pool = BlockPool(3, SIZE)
    chain, _ = seal_all(pool, [1, 2, 3, 4])
    assert pool.take(2) is None
    pool.let_go(chain, [])
    assert pool.take(3) is not None


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Sequences(RuleBasedStateMachine):
    """Sequences come, grow and go, while a shadow memory keeps what was really written to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE, chain=lambda parent, tokens: chain_hash(parent, tokens)[:1])
        self.version = 0
        self.memory: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.live: list[tuple[list[int], list[CachedBlock], list[int]]] = []

    @rule(tokens=TOKENS, half=st.integers(0, 4), at_once=st.booleans())
    def start(self, tokens: list[int], half: int, at_once: bool) -> None:
        digests: list[bytes] = []
        self.pool.extend_digests(digests, tokens, self.version)
        known = digests[:half]
        chain = self.pool.find(known, tokens, self.version)
        assert known == digests[: max(half, len(chain) + 1)]
        for index, entry in enumerate(chain):
            assert self.memory[entry.block] == (self.version, tuple(tokens[: (index + 1) * SIZE]))
        self.pool.hold(chain)
        own = self.pool.take(-(-len(tokens) // SIZE) - len(chain))
        if own is None:
            self.pool.let_go(chain, [])
            return
        for offset, block in enumerate(own, start=len(chain)):
            self.memory[block] = (self.version, tuple(tokens[: (offset + 1) * SIZE]))
        parts = [pack_ids(tokens[start : start + SIZE]) for start in range(0, len(tokens), SIZE)]
        if at_once:
            entries: list[CachedBlock] = []
            for index, block in zip(range(len(chain), len(digests)), own, strict=False):
                parent = entries[-1] if entries else chain[-1] if chain else None
                entries.append(CachedBlock(digests[index], parent, parts[index], block, holders=1))
            if self.pool.enter(entries):
                chain += entries
                del own[: len(entries)]
        while own and len(chain) < len(digests):
            index = len(chain)
            part = parts[index]
            entry_or_none = self.pool.seal(chain[-1] if chain else None, digests[index], part, own[0])
            if entry_or_none is None:
                break
            own.pop(0)
            chain.append(entry_or_none)
        self.live.append((tokens, chain, own))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, chain, own = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.let_go(chain, own)

    @rule()
    def new_version(self) -> None:
        for _, chain, own in self.live:
            self.pool.let_go(chain, own)
        self.live.clear()
        self.version += 1
        self.pool.forget()
        assert self.pool.available == BLOCKS

    @invariant()
    def what_is_held_is_held_for_its_content(self) -> None:
        held: set[int] = set()
        private: list[int] = []
        for tokens, chain, own in self.live:
            for index, entry in enumerate(chain):
                assert self.memory[entry.block] == (self.version, tuple(tokens[: (index + 1) * SIZE]))
                held.add(entry.block)
            private.extend(own)
        assert len(set(private)) == len(private)
        assert not held & set(private)
        assert self.pool.used == len(held) + len(private)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
