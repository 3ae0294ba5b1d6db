"""KV of a session out of a paged pool and into another: what is pinned, what is reserved. No bytes here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gyre.cell.engine.base import SUM_BYTES, KvLayout, KvManifest, KvUnavailable, head_bytes
from gyre.cell.engine.blocks import BlockPool, CachedBlock
from gyre.rdma import RegionHandle


class KvMemory(NamedTuple):
    """Where the KV heads [heads[0], heads[1]) of all blocks lie, block after block: `memory` is what a
    backend registers, `file` the region of this host that it is, if it is one."""

    heads: tuple[int, int]
    memory: object
    file: RegionHandle | None = None


class KvStore(Protocol):
    """The memory behind the blocks of a pool."""

    @property
    def vocab(self) -> int:
        """Tokens are 0 to this, exclusive."""

    def kv_layout(self, version: int) -> KvLayout: ...

    def kv_memory(self) -> tuple[KvMemory, ...]:
        """Of each of its ranks, while there is any. Raises KvUnavailable, RegionError."""

    def settle(self) -> None:
        """What passes have written is there, for whoever reads the memory."""

    def is_finite(self, rank: int, blocks: Sequence[int]) -> bool:
        """Whether all numbers in these blocks of a rank are."""

    def sums(self, rank: int, blocks: Sequence[int]) -> bytes:
        """Of these blocks of a rank, SUM_BYTES each: all their bytes added up as little-endian words of 8, or
        of 4 where a block is not a multiple of 8."""

    def write_kv(self, rank: int, blocks: Sequence[int], heads: tuple[int, int], source: memoryview) -> bytes:
        """Fills those of a rank's heads of the blocks that `source` has: `heads` of as many blocks. Answers
        the sums of what is there."""


class Pinned(NamedTuple):
    """What a manifest says of a pin; the sums of its blocks by rank."""

    layout: KvLayout
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    sums: tuple[bytes, ...]


class Reservation:
    """Blocks for KV that is to come: `own` for what is not there yet, after the held `chain`."""

    def __init__(self, manifest: KvManifest) -> None:
        self.manifest = manifest
        self.digests: list[bytes] = []
        self.chain: list[CachedBlock] = []
        self.own: list[int] = []

    @property
    def theirs(self) -> tuple[int, ...]:
        """The blocks of the manifest that `own` ones are for."""
        first = len(self.chain)
        return self.manifest.blocks[first : first + len(self.own)]


class Handover:
    """Pins and reservations, between two passes: it belongs to whoever drives the engine."""

    def __init__(self, pool: BlockPool, store: KvStore) -> None:
        self._pool = pool
        self._store = store
        self._pins: dict[str, list[CachedBlock]] = {}

    @property
    def pinned(self) -> int:
        """Blocks, one that is pinned twice counted twice."""
        return sum(len(chain) for chain in tuple(self._pins.values()))

    def pin(self, pin: str, session: str, tokens: Sequence[int], version: int) -> Pinned:
        """Holds what is cached of `tokens`. Raises KvUnavailable."""
        size = self._pool.block_tokens
        digests: list[bytes] = []
        self._pool.extend_digests(digests, tokens, version)
        chain = self._pool.match(digests, tokens)
        if not chain:
            raise KvUnavailable(f"no KV of session {session} is here: {len(tokens)} tokens are known of it")
        blocks = tuple(entry.block for entry in chain)
        sums = self._sums(session, blocks)
        self._pool.hold(chain)
        self._pins[pin] = chain
        return Pinned(self._store.kv_layout(version), tuple(tokens[: len(chain) * size]), blocks, sums)

    def _sums(self, session: str, blocks: Sequence[int]) -> tuple[bytes, ...]:
        self._store.settle()
        ranks = range(len(self._store.kv_memory()))
        if not all(self._store.is_finite(rank, blocks) for rank in ranks):
            # In a block that is used again later even what is masked would spoil sums.
            raise KvUnavailable(f"the KV of session {session} has numbers that are not finite")
        return tuple(self._store.sums(rank, blocks) for rank in ranks)

    def unpin(self, pin: str) -> None:
        """Nothing where there is no such pin."""
        self._pool.let_go(self._pins.pop(pin, ()), ())

    def unpin_all(self) -> None:
        for pin in tuple(self._pins):
            self.unpin(pin)

    def reserve(self, reservation: Reservation, version: int) -> None:
        """Holds what is here of it, and takes blocks for what is missing, as many as can be had. Nobody's
        held blocks are touched. Raises KvUnavailable."""
        pool, manifest = self._pool, reservation.manifest
        check(manifest, self._store.kv_layout(version), self._store.vocab)
        pool.extend_digests(reservation.digests, manifest.tokens, version)
        chain = pool.match(reservation.digests, manifest.tokens)
        pool.hold(chain)
        reservation.chain = chain
        missing = len(reservation.digests) - len(chain)
        reservation.own = pool.take(min(missing, pool.available)) or []
        if not chain and not reservation.own:
            raise KvUnavailable(
                f"no room for KV of session {manifest.session}: all {pool.blocks} blocks are held"
            )

    def seal(self, reservation: Reservation, version: int) -> int:
        """The blocks have their KV: makes them findable and answers how many tokens are. Raises KvUnavailable
        where weights have changed meanwhile."""
        manifest = reservation.manifest
        if manifest.layout.version != version:
            raise KvUnavailable(f"weights changed from {manifest.layout.version} to {version} meanwhile")
        while reservation.own and self._seal_next(reservation):
            reservation.own.pop(0)
        tokens = len(reservation.chain) * self._pool.block_tokens
        self.drop(reservation)
        return tokens

    def drop(self, reservation: Reservation) -> None:
        """Lets go of what it still holds."""
        chain, own = reservation.chain, reservation.own
        reservation.chain, reservation.own = [], []
        self._pool.let_go(chain, own)

    def _seal_next(self, reservation: Reservation) -> bool:
        chain, tokens = reservation.chain, reservation.manifest.tokens
        at, size = len(chain), self._pool.block_tokens
        parent = chain[-1] if chain else None
        entry = self._pool.seal(
            parent, reservation.digests[at], tokens[at * size : (at + 1) * size], reservation.own[0]
        )
        if entry is None:
            return False
        chain.append(entry)
        return True


def check(manifest: KvManifest, own: KvLayout, vocab: int) -> None:
    """Raises KvUnavailable unless blocks of `own` layout can be filled with it, whatever it holds."""
    for field in KvLayout.__struct_fields__:
        theirs, ours = getattr(manifest.layout, field), getattr(own, field)
        if theirs != ours:
            raise KvUnavailable(f"its {field} is {theirs!r}, this engine's is {ours!r}")
    tokens, blocks = manifest.tokens, manifest.blocks
    if not tokens or len(tokens) != len(blocks) * own.block_tokens:
        raise KvUnavailable(
            f"{len(tokens)} tokens are not those of {len(blocks)} blocks of {own.block_tokens}"
        )
    least, most = min(tokens), max(tokens)
    if least < 0 or most >= vocab:
        raise KvUnavailable(f"tokens are {least} to {most}: the model knows 0 to {vocab - 1}")
    if min(blocks) < 0:
        raise KvUnavailable(f"a block has the number {min(blocks)}")
    if not 0 < manifest.lease_s < float("inf"):
        raise KvUnavailable(f"it is leased for {manifest.lease_s} s")
    covered = 0
    for part in sorted(manifest.parts, key=lambda part: part.heads):
        first, last = part.heads
        if first != covered or last <= first:
            raise KvUnavailable(f"a part has heads [{first}, {last}) where [{covered}, ...) is due")
        covered = last
        needed = (max(blocks) + 1) * (last - first) * head_bytes(own)
        if part.region.nbytes < needed:
            raise KvUnavailable(f"region {part.region.name} has {part.region.nbytes} bytes, not {needed}")
        if len(part.sums) != len(blocks) * SUM_BYTES:
            raise KvUnavailable(f"{len(part.sums)} bytes are not the sums of {len(blocks)} blocks")
    if covered != own.kv_heads:
        raise KvUnavailable(f"its parts hold {covered} KV heads, the model has {own.kv_heads}")
