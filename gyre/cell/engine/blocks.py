"""Which KV blocks of an engine are held, which can be used again, which are free. No tensors here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from gyre.cell.engine.base import pack_ids

Chain = Callable[[bytes, bytes], bytes]
_ID_BYTES = 4


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """The 16-byte hash of a full block: of its tokens, packed, and, through `parent`, of all before them. The
    same in every process."""
    return blake2b(parent + tokens, digest_size=16).digest()


def root_hash(version: int) -> bytes:
    """The parent of a sequence's first block: chains of two weight versions never meet."""
    return blake2b(b"gyre-kv:%d" % version, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block with KV of all its tokens (packed), found by its chain hash. `holders` sequences read it
    now."""

    digest: bytes
    parent: CachedBlock | None
    tokens: bytes
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

    def extend_digests(
        self, digests: list[bytes], tokens: Sequence[int], version: int, blocks: int | None = None
    ) -> None:
        """Appends the hashes that `digests` lacks of all full blocks of `tokens`, or of some first ones."""
        size, nbytes = self.block_tokens, self.block_tokens * _ID_BYTES
        last = len(tokens) // size if blocks is None else blocks
        packed = pack_ids(tokens[len(digests) * size : last * size])
        digest = digests[-1] if digests else root_hash(version)
        for start in range(0, len(packed), nbytes):
            digest = self._chain(digest, packed[start : start + nbytes])
            digests.append(digest)

    def find(
        self, digests: list[bytes], tokens: Sequence[int], version: int, limit: int | None = None
    ) -> list[CachedBlock]:
        """The longest cached chain that starts `tokens`, of at most `limit` blocks, not held yet. Compares
        tokens, not only hashes. `digests` has the hashes of some first blocks; those of what is found are
        there then, and that of the block which is missing, where it is full."""
        size = self.block_tokens
        found: list[CachedBlock] = []
        for index in range(len(tokens) // size):
            packed = pack_ids(tokens[index * size : (index + 1) * size])
            if index == len(digests):
                digests.append(self._chain(digests[-1] if digests else root_hash(version), packed))
            entry = None if index == limit else self._cached.get(digests[index])
            parent = found[-1] if found else None
            if entry is None or entry.parent is not parent or entry.tokens != packed:
                break
            found.append(entry)
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
        self, parent: CachedBlock | None, digest: bytes, tokens: bytes, block: int
    ) -> CachedBlock | None:
        """Makes a full block of packed `tokens` findable, and holds it for its writer. Where the same tokens
        are cached already, that block is held instead and `block` is freed. None, and `block` stays the
        writer's own, when the hash belongs to other tokens."""
        entry = self._cached.get(digest)
        if entry is None:
            entry = CachedBlock(digest, parent, tokens, block)
            self._cached[digest] = entry
        elif entry.parent is parent and entry.tokens == tokens:
            self._free.append(block)
        else:
            return None
        self.hold((entry,))
        return entry

    def enter(self, entries: Sequence[CachedBlock]) -> bool:
        """As to seal one after the other, of entries that are held by their writer alone. False, and nothing
        is done, where one of their hashes is another's too."""
        found = {entry.digest: entry for entry in entries}
        if len(found) < len(entries) or not self._cached.keys().isdisjoint(found):
            return False
        self._cached.update(found)
        return True

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
