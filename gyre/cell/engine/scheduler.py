"""Which tokens the next forward pass computes. Plain state, no tensors, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gyre.cell.engine.base import pack_ids
from gyre.cell.engine.blocks import BlockPool
from gyre.cell.engine.prefixes import Prefixes
from gyre.cell.engine.sequence import Sequence


@dataclass(slots=True, frozen=True)
class Span:
    """Tokens [start, start + count) of a sequence. If they include its last, its next one is sampled."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def ids(self) -> list[int]:
        return self.sequence.tokens[self.start : self.start + self.count]

    @property
    def table(self) -> list[int]:
        return self.sequence.table

    @property
    def call(self) -> str:
        return self.sequence.request.call


class Scheduler:
    """Continuous batching. Every running sequence gets its decode token in each pass; prompts share the rest
    of `step_tokens`, long ones in several passes. Without a free block the sequence admitted last waits
    again, its KV dropped; the first one always goes on, so all finish: what is pinned or reserved
    beside it is so for a while only."""

    def __init__(self, pool: BlockPool, max_batch: int, step_tokens: int) -> None:
        self.pool = pool
        self.prefixes = Prefixes(pool)
        self.cached_tokens = 0
        self.preemptions = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._max_batch = max_batch
        self._step_tokens = step_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out; the KV of its full blocks stays cached."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._drop(sequence)

    def plan(self) -> list[Span]:
        """The next pass. Empty while there is work only where the rest of the pool is pinned or reserved."""
        spans: list[Span] = []
        budget = self._step_tokens
        waiting = len(self.waiting)
        while len(spans) < len(self.running):
            sequence = self.running[len(spans)]
            count = min(sequence.remaining, max(budget, 1))
            if not self._make_room(sequence, sequence.computed + count):
                break
            spans.append(Span(sequence, sequence.computed, count))
            budget -= count
        if len(self.waiting) == waiting:
            self._admit(spans, budget)
        return spans

    def advance(self, spans: list[Span]) -> None:
        """The pass is done: the KV of its spans is there, blocks that became full can be shared."""
        size = self.pool.block_tokens
        for span in spans:
            sequence = span.sequence
            sequence.computed = span.start + span.count
            if sequence.computed // size > len(sequence.chain):
                self._seal(sequence)

    def restart(self, version: int) -> None:
        """New weights: all KV is dropped, what is live is computed again."""
        self.prefixes.restart(version)
        while self.running:
            self._give_way()
        for sequence in self.waiting:
            sequence.digests.clear()
        self.pool.forget()

    def go_on(self, version: int, idle: Iterable[str]) -> None:
        """New weights: what is live goes on with the KV that it has, and so may `idle` sessions."""
        live = (sequence.request.session for sequence in (*self.running, *self.waiting))
        self.prefixes.go_on(version, {*idle, *live})

    def _admit(self, spans: list[Span], budget: int) -> None:
        computing = {self._next_digest(sequence) for sequence in self.running if sequence.remaining > 1}
        computing.discard(None)
        later: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_batch:
            sequence = self.waiting.popleft()
            digest = self._take_prefix(sequence)
            if digest in computing:
                # Another sequence computes this very block now: next pass it will be found.
                self._drop(sequence)
                later.append(sequence)
                continue
            spare = len(self.running)
            blocks = self._blocks_for(len(sequence.tokens)) - len(sequence.table)
            crowded = spare > 0 and blocks + spare > self.pool.available
            if crowded or not self._reserve(sequence, len(sequence.tokens)):
                self._drop(sequence)
                later.append(sequence)
                break
            self.running.append(sequence)
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
                self.cached_tokens += sequence.computed
            if digest is not None:
                computing.add(digest)
            count = min(sequence.remaining, budget)
            spans.append(Span(sequence, sequence.computed, count))
            budget -= count
        self.waiting.extendleft(reversed(later))

    def _take_prefix(self, sequence: Sequence) -> bytes | None:
        """Holds what is cached of it, and answers the hash of the first full block that is not. Its last
        token is always computed: its logits are needed."""
        pool, tokens = self.pool, sequence.tokens
        usable = (len(tokens) - 1) // pool.block_tokens
        prefix = self.prefixes.find(sequence.request.session, tokens, sequence.digests, usable)
        pool.hold(prefix.chain)
        sequence.kv_version, sequence.chain = prefix
        sequence.table = [entry.block for entry in sequence.chain]
        sequence.computed = len(sequence.chain) * pool.block_tokens
        return self._next_digest(sequence)

    def _next_digest(self, sequence: Sequence) -> bytes | None:
        """Of the first block whose KV is not shared yet, if it is full."""
        pool, version, index = self.pool, sequence.kv_version, len(sequence.chain)
        if index >= len(sequence.tokens) // pool.block_tokens:
            return None
        digests = sequence.digests[version]
        pool.extend_digests(digests, sequence.tokens, version, index + 1)
        return digests[index]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_tokens)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        missing = self._blocks_for(tokens) - len(sequence.table)
        if missing > 0:
            blocks = self.pool.take(missing)
            if blocks is None:
                return False
            sequence.table.extend(blocks)
        return True

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Reserves, at the cost of those admitted later; False if it had to give way itself."""
        while not self._reserve(sequence, tokens):
            self.preemptions += 1
            if self._give_way() is sequence:
                return False
        return True

    def _seal(self, sequence: Sequence) -> None:
        pool = self.pool
        size = pool.block_tokens
        full = sequence.computed // size
        digests = sequence.digests[sequence.kv_version]
        pool.extend_digests(digests, sequence.tokens, sequence.kv_version, full)
        while sequence.sealable and (index := len(sequence.chain)) < full:
            parent = sequence.chain[-1] if sequence.chain else None
            tokens = pack_ids(sequence.tokens[index * size : (index + 1) * size])
            entry = pool.seal(parent, digests[index], tokens, sequence.table[index])
            if entry is None:
                sequence.sealable = False
                break
            sequence.table[index] = entry.block
            sequence.chain.append(entry)

    def _give_way(self) -> Sequence:
        sequence = self.running.pop()
        self._drop(sequence)
        self.waiting.appendleft(sequence)
        return sequence

    def _drop(self, sequence: Sequence) -> None:
        self.pool.let_go(sequence.chain, sequence.table[len(sequence.chain) :])
        sequence.chain = []
        sequence.table = []
        sequence.computed = 0
        sequence.sealable = True
