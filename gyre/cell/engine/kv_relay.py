"""Turns at the stages of an engine whose pool others cannot read: who takes KV over says which blocks it
wants next, who gives it puts them into a slot and says which, until that was read."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from gyre.cell.engine.base import KvManifest, KvUnavailable, pack_ids, unpack_ids
from gyre.rdma import Backend, Note, PeerLost, RegionError

# Of a stage: some are filled for others while others' KV comes by the rest.
SLOTS_OUT = 2
SLOTS_IN = 2

CLOSE_TIMEOUT_S = 1.0

log = structlog.get_logger()

Fill = Callable[[Sequence[int], int], Future[None]]


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Of what `pin` holds these blocks, packed."""

    ticket: int
    pin: str
    blocks: bytes


class Filled(msgspec.Struct, frozen=True, array_like=True, tag="filled"):
    """They are in this slot of each part, until `Taken` is told."""

    ticket: int
    slot: int
    pin: str


class Declined(msgspec.Struct, frozen=True, array_like=True, tag="declined"):
    ticket: int
    why: str


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The slot of that ticket was read, or is not wanted any more."""

    ticket: int
    pin: str


Told = Want | Filled | Declined | Taken

_decoder = msgspec.msgpack.Decoder(Told)


@dataclass
class _Given:
    """A pin: its blocks, and by who wants them and its ticket the slots that are filled."""

    blocks: frozenset[int]
    slots: dict[tuple[str, int], int] = field(default_factory=dict)


class KvRelay:
    """Of one engine, on the event loop of its backend, of which it is the one that hears notes. `fill` has
    blocks put into a slot of the stages of all ranks."""

    def __init__(self, backend: Backend, fill: Fill, slot_blocks: int) -> None:
        self._backend = backend
        self._fill = fill
        self._slot_blocks = slot_blocks
        self._free = list(range(SLOTS_OUT))
        # A slot is free, or a pin is over.
        self._changed = asyncio.Event()
        self._given: dict[str, _Given] = {}
        self._wanted: dict[int, asyncio.Future[int]] = {}
        self._tickets = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hearing = asyncio.get_running_loop().create_task(self._hear(), name="hear of KV")

    def give(self, pin: str, blocks: Sequence[int]) -> None:
        """Whoever asks may have these until `end`."""
        self._given[pin] = _Given(frozenset(blocks))

    def end(self, pin: str) -> None:
        given = self._given.pop(pin, None)
        if given is not None:
            self._free.extend(given.slots.values())
            self._change()

    @asynccontextmanager
    async def turn(self, manifest: KvManifest, blocks: Sequence[int]) -> AsyncIterator[int]:
        """The slot of each of its parts in which these blocks are within. Raises KvUnavailable,
        RegionError."""
        peer, ticket = manifest.proof.peer, next(self._tickets)
        wanted = self._wanted[ticket] = asyncio.get_running_loop().create_future()
        try:
            await self._tell(peer, Want(ticket, manifest.pin, pack_ids(blocks)))
            yield await self._slot(peer, wanted)
        finally:
            del self._wanted[ticket]
            # A slot that comes later is given back as it comes.
            if wanted.done() and not wanted.cancelled() and wanted.exception() is None:
                self._begin(self._taken(peer, Taken(ticket, manifest.pin)))

    async def _slot(self, peer: str, wanted: asyncio.Future[int]) -> int:
        """Who gives may wait for a slot, or be dead."""
        lost = asyncio.get_running_loop().create_task(self._backend.until_lost(peer), name="watch a giver")
        try:
            either: set[asyncio.Future[Any]] = {wanted, lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                lost.result()
                raise PeerLost("", peer, "notify", "it is gone, and the KV with it")
            return wanted.result()
        finally:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    async def close(self) -> None:
        """All pins have ended: who waits for something hears that."""
        self._hearing.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(self._hearing, *self._tasks, return_exceptions=True)

    # --- notes --------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        async for note in self._backend.notes():
            self._heard(note)

    def _heard(self, note: Note) -> None:
        try:
            told = _decoder.decode(note.message)
        except msgspec.MsgspecError as error:
            log.warning("kv_relay_bad_note", peer=note.peer, why=str(error))
            return
        match told:
            case Want():
                self._begin(self._answer(note.peer, told))
            case Taken(ticket=ticket, pin=pin):
                self._take_back(note.peer, ticket, pin)
            case Filled(ticket=ticket, slot=slot, pin=pin):
                wanted = self._wanted.get(ticket)
                if wanted is not None and not wanted.done():
                    wanted.set_result(slot)
                else:
                    self._begin(self._taken(note.peer, Taken(ticket, pin)))
            case Declined(ticket=ticket, why=why):
                wanted = self._wanted.get(ticket)
                if wanted is not None and not wanted.done():
                    wanted.set_exception(KvUnavailable(f"it is not given: {why}"))

    async def _answer(self, peer: str, want: Want) -> None:
        answer: Filled | Declined
        try:
            answer = Filled(want.ticket, await self._filled(peer, want), want.pin)
        except Exception as error:
            answer = Declined(want.ticket, str(error))
        try:
            await self._tell(peer, answer)
        except RegionError:
            # Who wanted it is gone.
            self._take_back(peer, want.ticket, want.pin)

    async def _filled(self, peer: str, want: Want) -> int:
        blocks = unpack_ids(want.blocks)
        given = self._given.get(want.pin)
        if given is None or not given.blocks.issuperset(blocks):
            raise KvUnavailable("that is not pinned")
        if not 0 < len(blocks) <= self._slot_blocks:
            raise KvUnavailable(f"{len(blocks)} blocks at a time: a slot has {self._slot_blocks}")
        while self._given.get(want.pin) is given and not self._free:
            await self._changed.wait()
        self._check_pinned(want.pin, given)
        slot = self._free.pop()
        try:
            await asyncio.wrap_future(self._fill(blocks, slot))
            self._check_pinned(want.pin, given)
            if (peer, want.ticket) in given.slots:
                raise KvUnavailable(f"ticket {want.ticket} is used already")
        except BaseException:
            self._give_back(slot)
            raise
        given.slots[peer, want.ticket] = slot
        return slot

    def _check_pinned(self, pin: str, given: _Given) -> None:
        if self._given.get(pin) is not given:
            raise KvUnavailable("it is not pinned any more")

    def _take_back(self, peer: str, ticket: int, pin: str) -> None:
        """Nothing where that ticket has no slot."""
        given = self._given.get(pin)
        slot = given.slots.pop((peer, ticket), None) if given is not None else None
        if slot is not None:
            self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        self._free.append(slot)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _taken(self, peer: str, taken: Taken) -> None:
        with suppress(RegionError):
            await self._tell(peer, taken)

    async def _tell(self, peer: str, told: Told) -> None:
        await self._backend.notify(peer, msgspec.msgpack.encode(told))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="relay KV")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
