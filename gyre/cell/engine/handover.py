"""KV of a session out of a paged pool and into another, through regions. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol
from uuid import uuid4

from gyre.cell.engine.base import KvLayout, KvManifest, KvPart, KvUnavailable
from gyre.cell.engine.blocks import BlockPool, CachedBlock
from gyre.rdma import Region, Regions

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}


class KvStore(Protocol):
    """The memory behind the blocks of a pool."""

    @property
    def vocab(self) -> int:
        """Tokens are 0 to this, exclusive."""

    def kv_layout(self, version: int) -> KvLayout: ...

    def kv_parts(self) -> tuple[tuple[int, int], ...]:
        """The heads that each of its ranks holds: all of them, each once, in order."""

    def read_kv(self, blocks: Sequence[int], parts: Sequence[Region]) -> None:
        """Copies blocks, one after the other, the heads of each part into its region."""

    def write_kv(self, blocks: Sequence[int], part: KvPart, source: memoryview, first: int) -> bool:
        """Fills the part's heads of blocks from those in `source`, its region, from the block `first` on.
        False where a number in it is not finite: such are not written."""


class Handover:
    """Exports and imports, between two passes: it belongs to whoever drives the engine."""

    def __init__(self, pool: BlockPool, store: KvStore, regions: Regions | None) -> None:
        self._pool = pool
        self._store = store
        self._regions = regions

    def export(self, session: str, tokens: Sequence[int], version: int) -> KvManifest:
        """A copy of what is cached of `tokens`. Raises KvUnavailable, RegionError."""
        regions = self._backend()
        size = self._pool.block_tokens
        digests: list[bytes] = []
        self._pool.extend_digests(digests, tokens, version)
        chain = self._pool.match(digests, tokens)
        if not chain:
            raise KvUnavailable(f"no KV of session {session} is here: {len(tokens)} tokens are known of it")
        layout = self._store.kv_layout(version)
        parts = self._read([entry.block for entry in chain], head_bytes(layout), regions)
        held = tuple(tokens[: len(chain) * size])
        return KvManifest(session=session, layout=layout, tokens=held, parts=parts)

    def take_over(self, manifest: KvManifest, version: int) -> int:
        """Copies what is missing of it into free blocks and makes it findable: the tokens that are. Nobody's
        held blocks are touched. Raises KvUnavailable, RegionError; then nothing more is findable."""
        regions = self._backend()
        check(manifest, self._store.kv_layout(version), self._store.vocab)
        pool, tokens, size = self._pool, manifest.tokens, self._pool.block_tokens
        digests: list[bytes] = []
        pool.extend_digests(digests, tokens, version)
        chain = pool.match(digests, tokens)
        pool.hold(chain)
        own = pool.take(min(len(digests) - len(chain), pool.available)) or []
        try:
            if own:
                self._fill(manifest.parts, own, len(chain), regions)
            while own and (entry := self._seal(chain, digests, tokens, own[0])) is not None:
                own.pop(0)
                chain.append(entry)
        finally:
            pool.let_go(chain, own)
        if not chain:
            raise KvUnavailable(
                f"no room for KV of session {manifest.session}: all {pool.blocks} blocks are held"
            )
        return len(chain) * size

    def _read(self, blocks: Sequence[int], bytes_per_head: int, regions: Regions) -> tuple[KvPart, ...]:
        name, heads = f"kv-{uuid4().hex}", self._store.kv_parts()
        with ExitStack() as stack:
            made: list[Region] = []
            try:
                for first, last in heads:
                    nbytes = len(blocks) * bytes_per_head * (last - first)
                    made.append(stack.enter_context(regions.allocate(f"{name}-{first}", nbytes)))
                self._store.read_kv(blocks, made)
            except BaseException:
                for region in made:
                    regions.free(region.handle)
                raise
            return tuple(
                KvPart(heads=part, region=region.handle) for part, region in zip(heads, made, strict=True)
            )

    def _fill(self, parts: Sequence[KvPart], blocks: Sequence[int], first: int, regions: Regions) -> None:
        for part in parts:
            with regions.open(part.region) as source:
                if not self._store.write_kv(blocks, part, source.buffer, first):
                    # In a block that is used again later even what is masked would spoil sums.
                    raise KvUnavailable(f"region {part.region.name} holds numbers that are not finite")

    def _seal(
        self, chain: Sequence[CachedBlock], digests: Sequence[bytes], tokens: Sequence[int], block: int
    ) -> CachedBlock | None:
        at, size = len(chain), self._pool.block_tokens
        parent = chain[-1] if chain else None
        return self._pool.seal(parent, digests[at], tokens[at * size : (at + 1) * size], block)

    def _backend(self) -> Regions:
        if self._regions is None:
            raise KvUnavailable("the engine was given no regions to hand KV over in")
        return self._regions


def head_bytes(layout: KvLayout) -> int:
    """Of one head of one block, all layers."""
    return layout.layers * 2 * layout.block_tokens * layout.head_dim * _ITEM_BYTES[layout.dtype]


def check(manifest: KvManifest, own: KvLayout, vocab: int) -> None:
    """Raises KvUnavailable unless blocks of `own` layout can be filled with it, whatever it holds."""
    for field in KvLayout.__struct_fields__:
        theirs, ours = getattr(manifest.layout, field), getattr(own, field)
        if theirs != ours:
            raise KvUnavailable(f"its {field} is {theirs!r}, this engine's is {ours!r}")
    tokens = manifest.tokens
    if not tokens or len(tokens) % own.block_tokens:
        raise KvUnavailable(f"{len(tokens)} tokens are no full blocks of {own.block_tokens}")
    if min(tokens) < 0 or max(tokens) >= vocab:
        raise KvUnavailable(f"tokens are {min(tokens)} to {max(tokens)}: the model knows 0 to {vocab - 1}")
    blocks = len(tokens) // own.block_tokens
    covered = 0
    for part in sorted(manifest.parts, key=lambda part: part.heads):
        first, last = part.heads
        if first != covered or last <= first:
            raise KvUnavailable(f"a part has heads [{first}, {last}) where [{covered}, ...) is due")
        covered = last
        expected = blocks * (last - first) * head_bytes(own)
        if part.region.nbytes != expected:
            raise KvUnavailable(f"region {part.region.name} has {part.region.nbytes} bytes, not {expected}")
    if covered != own.kv_heads:
        raise KvUnavailable(f"its parts hold {covered} KV heads, the model has {own.kv_heads}")
