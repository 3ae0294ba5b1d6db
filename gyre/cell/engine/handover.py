"""KV of a session out of a paged pool and into another: what is pinned, what is reserved. No bytes here."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gyre.cell.engine.base import SUM_BYTES, KvLayout, KvManifest, KvUnavailable, head_bytes
from gyre.cell.engine.blocks import BlockPool, CachedBlock
from gyre.cell.engine.kv_relay import SLOTS_OUT
from gyre.cell.engine.prefixes import Digests, Prefixes
from gyre.rdma import PageLock, RegionHandle


class KvMemory(NamedTuple):
    """Where the KV heads [heads[0], heads[1]) of all blocks lie, block after block, or of those that are in
    slots: `memory` is what a backend registers, `file` the region of this host that it is, if it is one."""

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

    @property
    def slot_blocks(self) -> int:
        """Of a slot of its stages; 0 where others read the pool itself."""

    def fill_slot(self, blocks: Sequence[int], slot: int) -> None:
        """Puts blocks into that slot of the stage of each rank. Raises EngineFault."""

    def read_kv(self, rank: int, blocks: Sequence[int], target: memoryview) -> None:
        """Copies blocks of a rank to host memory, one after the other."""

    @property
    def page_lock(self) -> PageLock | None:
        """For memory that KV is copied from and to, if it is better locked."""

    def settle(self) -> None:
        """What passes have written is there, for whoever reads the memory."""

    def sums(self, rank: int, blocks: Sequence[int]) -> bytes:
        """Of these blocks of a rank, SUM_BYTES each: all their bytes added up as little-endian words of 8, or
        of 4 where a block is not a multiple of 8."""

    def finite_sums(self, rank: int, blocks: Sequence[int]) -> bytes | None:
        """The same, or None where a number in them is not finite."""

    def write_kv(self, rank: int, blocks: Sequence[int], heads: tuple[int, int], source: memoryview) -> bytes:
        """Fills those of a rank's heads of the blocks that `source` has: `heads` of as many blocks. Answers
        the sums of what is there."""


class Pinned(NamedTuple):
    """What a manifest says of a pin; `tokens` packed, the sums of its blocks by rank."""

    layout: KvLayout
    newest: int
    tokens: bytes
    blocks: tuple[int, ...]
    sums: tuple[bytes, ...]


class Reservation:
    """Blocks for KV that is to come: `own` for what is not there yet, after the held `chain`. They become
    `entries`."""

    def __init__(self, manifest: KvManifest) -> None:
        self.manifest = manifest
        self.tokens: array[int] = array("i")
        self.digests: list[bytes] = []
        self.chain: list[CachedBlock] = []
        self.own: list[int] = []
        self.entries: list[CachedBlock] = []

    @property
    def theirs(self) -> tuple[int, ...]:
        """The blocks of the manifest that `own` ones are for."""
        first = len(self.chain)
        return self.manifest.blocks[first : first + len(self.own)]


class Handover:
    """Pins and reservations, between two passes: it belongs to whoever drives the engine. With `keep` it also
    takes KV of older weights, for the session that it belongs to."""

    def __init__(self, pool: BlockPool, prefixes: Prefixes, store: KvStore, keep: bool) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self._store = store
        self._keep = keep
        self._pins: dict[str, list[CachedBlock]] = {}

    @property
    def pinned(self) -> int:
        """Blocks, one that is pinned twice counted twice."""
        return sum(len(chain) for chain in tuple(self._pins.values()))

    def pin(self, pin: str, session: str, tokens: Sequence[int], digests: Digests) -> Pinned:
        """Holds what is cached of `tokens`. Raises KvUnavailable."""
        version, chain = self._prefixes.find(session, tokens, digests)
        if not chain:
            raise KvUnavailable(f"no KV of session {session} is here: {len(tokens)} tokens are known of it")
        blocks = tuple(entry.block for entry in chain)
        sums = self._sums(session, blocks)
        self._pool.hold(chain)
        self._pins[pin] = chain
        packed = b"".join(entry.tokens for entry in chain)
        return Pinned(self._store.kv_layout(version), self._prefixes.version, packed, blocks, sums)

    def _sums(self, session: str, blocks: Sequence[int]) -> tuple[bytes, ...]:
        self._store.settle()
        found: list[bytes] = []
        for rank in range(len(self._store.kv_memory())):
            if (sums := self._store.finite_sums(rank, blocks)) is None:
                # In a block that is used again later even what is masked would spoil sums.
                raise KvUnavailable(f"the KV of session {session} has numbers that are not finite")
            found.append(sums)
        return tuple(found)

    def unpin(self, pin: str) -> None:
        """Nothing where there is no such pin."""
        self._pool.let_go(self._pins.pop(pin, ()), ())

    def unpin_all(self) -> None:
        for pin in tuple(self._pins):
            self.unpin(pin)

    def reserve(self, reservation: Reservation) -> None:
        """Holds what is here of it, and takes blocks for what is missing, as many as can be had. Nobody's
        held blocks are touched. Raises KvUnavailable."""
        pool, manifest = self._pool, reservation.manifest
        self._check_versions(manifest)
        layout = self._store.kv_layout(manifest.layout.version)
        tokens = reservation.tokens = check(manifest, layout, self._store.vocab)
        reservation.chain = pool.find(reservation.digests, tokens, layout.version)
        pool.hold(reservation.chain)
        missing = len(manifest.blocks) - len(reservation.chain)
        reservation.own = pool.take(min(missing, pool.available)) or []
        if not reservation.chain and not reservation.own:
            raise KvUnavailable(
                f"no room for KV of session {manifest.session}: all {pool.blocks} blocks are held"
            )

    def prepare(self, reservation: Reservation, blocks: int) -> None:
        """What `seal` needs, of so many more blocks; it can be done while they are being filled."""
        pool, manifest, entries = self._pool, reservation.manifest, reservation.entries
        begun, held = len(entries), len(reservation.chain)
        own = reservation.own[begun : begun + blocks]
        first, last = held + begun, held + begun + len(own)
        digests, tokens, nbytes = reservation.digests, manifest.tokens, 4 * pool.block_tokens
        pool.extend_digests(digests, reservation.tokens, manifest.layout.version, last)
        parent = entries[-1] if entries else reservation.chain[-1] if held else None
        starts = range(first * nbytes, last * nbytes, nbytes)
        for digest, start, block in zip(digests[first:last], starts, own, strict=True):
            parent = CachedBlock(digest, parent, tokens[start : start + nbytes], block, holders=1)
            entries.append(parent)

    def seal(self, reservation: Reservation) -> int:
        """The blocks have their KV: makes them findable and answers how many tokens are. Raises KvUnavailable
        where weights have changed meanwhile."""
        manifest, entries = reservation.manifest, reservation.entries
        self._check_versions(manifest)
        self.prepare(reservation, len(reservation.own))
        if self._pool.enter(entries):
            reservation.chain += entries
            reservation.own.clear()
        else:
            self._seal_each(reservation)
        tokens = len(reservation.chain) * self._pool.block_tokens
        if tokens:
            self._prefixes.admit(manifest.session, manifest.layout.version)
        self.drop(reservation)
        return tokens

    def drop(self, reservation: Reservation) -> None:
        """Lets go of what it still holds."""
        chain, own = reservation.chain, reservation.own
        reservation.chain, reservation.own = [], []
        self._pool.let_go(chain, own)

    def _seal_each(self, reservation: Reservation) -> None:
        """As far as hashes are not those of other tokens."""
        chain = reservation.chain
        for entry in reservation.entries:
            parent = chain[-1] if chain else None
            sealed = self._pool.seal(parent, entry.digest, entry.tokens, entry.block)
            if sealed is None:
                return
            chain.append(sealed)
            reservation.own.pop(0)

    def _check_versions(self, manifest: KvManifest) -> None:
        oldest, newest, version = manifest.layout.version, manifest.newest, self._prefixes.version
        if oldest == newest == version or (self._keep and oldest <= newest <= version):
            return
        found = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
        raise KvUnavailable(f"its version is {found}, this engine's is {version}")


def check(manifest: KvManifest, own: KvLayout, vocab: int) -> array[int]:
    """Its tokens. Raises KvUnavailable unless blocks of `own` layout can be filled with it, whatever it
    holds."""
    for field in KvLayout.__struct_fields__:
        theirs, ours = getattr(manifest.layout, field), getattr(own, field)
        if theirs != ours:
            raise KvUnavailable(f"its {field} is {theirs!r}, this engine's is {ours!r}")
    blocks = manifest.blocks
    if not blocks or len(manifest.tokens) != 4 * len(blocks) * own.block_tokens:
        raise KvUnavailable(
            f"{len(manifest.tokens)} bytes are not the tokens of {len(blocks)} blocks of {own.block_tokens}"
        )
    # Unsigned, what is negative is beyond any vocabulary.
    if (most := max(memoryview(manifest.tokens).cast("I"))) >= vocab:
        raise KvUnavailable(f"a token is {most}: the model knows 0 to {vocab - 1}")
    if min(blocks) < 0:
        raise KvUnavailable(f"a block has the number {min(blocks)}")
    if manifest.slot_blocks < 0:
        raise KvUnavailable(f"a slot has {manifest.slot_blocks} blocks")
    if not 0 < manifest.lease_s < float("inf"):
        raise KvUnavailable(f"it is leased for {manifest.lease_s} s")
    covered = 0
    for part in sorted(manifest.parts, key=lambda part: part.heads):
        first, last = part.heads
        if first != covered or last <= first:
            raise KvUnavailable(f"a part has heads [{first}, {last}) where [{covered}, ...) is due")
        covered = last
        count = SLOTS_OUT * manifest.slot_blocks or max(blocks) + 1
        needed = count * (last - first) * head_bytes(own)
        if part.region.nbytes < needed:
            raise KvUnavailable(f"region {part.region.name} has {part.region.nbytes} bytes, not {needed}")
        if len(part.sums) != len(blocks) * SUM_BYTES:
            raise KvUnavailable(f"{len(part.sums)} bytes are not the sums of {len(blocks)} blocks")
    if covered != own.kv_heads:
        raise KvUnavailable(f"its parts hold {covered} KV heads, the model has {own.kv_heads}")
    return array("i", manifest.tokens)
