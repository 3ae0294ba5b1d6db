"""Which KV blocks of an engine are held, which can be used again, which are free. No tensors here."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

Chain = Callable[[bytes, Sequence[int]], bytes]


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The 16-byte hash of a full block: of its tokens and, through `parent`, of all before them. The same in
    every process."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()


def root_hash(version: int) -> bytes:
    """The parent of a sequence's first block: chains of two weight versions never meet."""
    return blake2b(b"gyre-kv:%d" % version, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block with KV of all its tokens, found by its chain hash. `holders` sequences read it now."""

    digest: bytes
    parent: CachedBlock | None
    tokens: tuple[int, ...]
    block: int
    holders: int = 0


class BlockPool:
    """Hands out block numbers 0..blocks-1.

    Whoever holds a cached block holds its parents too and lets go of the last one first; so of unheld blocks
    a child is always older than its parent, and taking the oldest never cuts a chain in the middle.
    """

    def __init__(self, blocks: int, block_tokens: int, chain: Chain = chain_hash) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._chain = chain
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: dict[bytes, CachedBlock] = {}
        self._unheld: OrderedDict[bytes, CachedBlock] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `take` can hand out: free ones and cached ones that nobody holds."""
        return len(self._free) + len(self._unheld)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.blocks - self.available

    def extend_digests(self, digests: list[bytes], tokens: Sequence[int], version: int) -> None:
        """Appends the hashes of the full blocks of `tokens` that `digests` lacks."""
        size = self.block_tokens
        for index in range(len(digests), len(tokens) // size):
            parent = digests[-1] if digests else root_hash(version)
            digests.append(self._chain(parent, tokens[index * size : (index + 1) * size]))

    def match(self, digests: Sequence[bytes], tokens: Sequence[int]) -> list[CachedBlock]:
        """The longest cached chain that starts `tokens`, not held yet. Compares tokens, not only hashes."""
        found: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for digest in digests:
            entry = self._cached.get(digest)
            start = len(found) * self.block_tokens
            if entry is None or entry.parent is not parent:
                break
            if entry.tokens != tuple(tokens[start : start + self.block_tokens]):
                break
            found.append(entry)
            parent = entry
        return found

    def hold(self, chain: Iterable[CachedBlock]) -> None:
        """Keeps a chain from `match` until it is let go."""
        for entry in chain:
            entry.holders += 1
            self._unheld.pop(entry.digest, None)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks to write, the longest unused cached ones given up as needed; None if too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            digest, entry = self._unheld.popitem(last=False)
            del self._cached[digest]
            self._free.append(entry.block)
        return [self._free.pop() for _ in range(count)]

    def seal(
        self, parent: CachedBlock | None, digest: bytes, tokens: Sequence[int], block: int
    ) -> CachedBlock | None:
        """Makes a full block findable, and holds it for its writer. Where the same tokens are cached already,
        that block is held instead and `block` is freed. None, and `block` stays the writer's own, when the
        hash belongs to other tokens."""
        entry = self._cached.get(digest)
        if entry is None:
            entry = CachedBlock(digest, parent, tuple(tokens), block)
            self._cached[digest] = entry
        elif entry.parent is parent and entry.tokens == tuple(tokens):
            self._free.append(block)
        else:
            return None
        self.hold((entry,))
        return entry

    def let_go(self, chain: Sequence[CachedBlock], own: Iterable[int]) -> None:
        """Ends a sequence's hold: `chain` stays cached while there is room, `own` blocks are free."""
        self._free.extend(own)
        for entry in reversed(chain):
            entry.holders -= 1
            if entry.holders == 0:
                self._unheld[entry.digest] = entry

    def forget(self) -> None:
        """Frees every cached block that nobody holds."""
        for entry in self._unheld.values():
            del self._cached[entry.digest]
            self._free.append(entry.block)
        self._unheld.clear()
