"""Blobs on their way from a peer, and the messages that wait for them."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from gyre.actors.blob import Blob
from gyre.actors.bulk.memory import Buffer, Pool, lend, size_class
from gyre.actors.bulk.pieces import PIECE_BYTES
from gyre.actors.bulk.shared import open_segment
from gyre.actors.errors import BadMessage, LinkLost
from gyre.actors.serving import serve
from gyre.actors.wire import (
    MAX_BLOBS,
    MAX_BLOBS_BYTES,
    Back,
    End,
    Failed,
    Frame,
    Item,
    Laden,
    Landed,
    Loaded,
    Reply,
    Request,
    Share,
    Shared,
    Taken,
    Want,
)

if TYPE_CHECKING:
    from gyre.actors.link import Link

# Blobs that may be under way to one actor, or wait in its mailbox, from one peer; the same for the items of
# a stream. A message that is larger comes alone.
UNDER_WAY_BYTES = 256 * 2**20
MAPPED_SEGMENTS = 256

Key = tuple[int, int]


class _Held:
    """A message that waits for its blobs, or behind one that does."""

    __slots__ = ("blobs", "came_s", "count", "first", "frame", "missing", "nbytes", "wanted")

    def __init__(self, frame: Frame, came_s: float) -> None:
        self.frame = frame
        self.came_s = came_s
        self.blobs: list[Blob | None] = []
        self.first = 0
        self.count = 0
        self.nbytes = 0
        self.missing = 0
        self.wanted = False


class _Coming:
    """A blob that was announced."""

    __slots__ = ("at", "got", "held", "nbytes", "view")

    def __init__(self, held: _Held, at: int, nbytes: int) -> None:
        self.held = held
        self.at = at
        self.nbytes = nbytes
        self.got = 0
        self.view: memoryview | None = None


class _Load:
    """Where the message came from that has its blobs in a mailbox."""

    __slots__ = ("_incoming", "_key", "_nbytes")

    def __init__(self, incoming: Incoming, key: Key, nbytes: int) -> None:
        self._incoming = incoming
        self._key = key
        self._nbytes = nbytes

    def taken(self, actor_id: int) -> None:
        self._incoming.unload(self._key, self._nbytes)
        self._incoming.link.taken(actor_id)


class Incoming:
    """Of one link. What is for one actor, or of one stream, is a lane: it keeps its order, and does not wait
    for what is in others."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.lanes: dict[Key, deque[_Held]] = {}
        self._loads: dict[Key, int] = {}
        self._coming: dict[int, _Coming] = {}
        self._announced = 0
        self._buffers: Pool[Buffer] | None = None
        self._scratch = memoryview(b"")
        self._segments: dict[int, mmap.mmap] = {}
        self._lent: dict[int, None] = {}

    # --- messages -------------------------------------------------------------------------------

    def laden(self, frame: Laden) -> None:
        """Comes to its actor, its asker or its consumer when its blobs have. BadMessage, LinkLost."""
        inner = self.link.node.codec.frame(memoryview(bytes(frame.frame)))
        if not isinstance(inner, Request | Reply | Item) or inner.seq != frame.seq:
            raise BadMessage("a frame with blobs that is no message")
        if (
            len(frame.parcels) > MAX_BLOBS
            or sum(abs(parcel.nbytes) for parcel in frame.parcels) > MAX_BLOBS_BYTES
        ):
            raise BadMessage("more blobs in one message than are allowed")
        held = _Held(inner, self.link.node.loop.time())
        held.first = self._announced + 1
        for at, parcel in enumerate(frame.parcels):
            if parcel.nbytes == len(parcel.data):
                held.blobs.append(Blob(parcel.data))
                continue
            if parcel.nbytes < 0 or parcel.data:
                raise BadMessage("a blob of another length than it says")
            self._announced += 1
            self._coming[self._announced] = _Coming(held, at, parcel.nbytes)
            held.blobs.append(None)
            held.nbytes += parcel.nbytes
            held.count += 1
        held.missing = held.count
        key = _key(inner)
        if not isinstance(inner, Request) and inner.id not in self.link.pending:
            # Its asker is gone, and has told the peer, who keeps nothing of it.
            for id in range(held.first, self._announced + 1):
                del self._coming[id]
            return
        self.lanes.setdefault(key, deque()).append(held)
        self._want(key)
        self._pump(key)

    def hold(self, frame: Frame) -> bool:
        """Whether a message without blobs has to wait, as one before it does."""
        if not isinstance(frame, Request | Item | End | Failed):
            return False
        lane = self.lanes.get(_key(frame))
        if lane is None:
            return False
        if isinstance(frame, Request | Item):
            frame.body = msgspec.Raw(bytes(frame.body))  # it was a view of what came
        lane.append(_Held(frame, self.link.node.loop.time()))
        return True

    def drop(self, message: int) -> None:
        """Nobody waits for it any more: a request that was cancelled, a stream that was closed."""
        for key, lane in [*self.lanes.items()]:
            dropped = [held for held in lane if getattr(held.frame, "id", None) == message]
            for held in dropped:
                lane.remove(held)
                for id in range(held.first, held.first + held.count):
                    self._coming.pop(id, None)
                if held.wanted:
                    self._unload(key, held.nbytes)
                if isinstance(held.frame, Request):
                    self.link.send(Taken(0, held.frame.to, 1))
            if not lane:
                self.lanes.pop(key, None)
            elif dropped:
                self._want(key)
                try:
                    self._pump(key)
                except (BadMessage, LinkLost) as error:
                    self.link.give_up(str(error))
        self.forget_stream(message)

    def forget_stream(self, id: int) -> None:
        """What of its items is not taken yet holds back nothing any more."""
        self._loads.pop((1, id), None)

    def unload(self, key: Key, nbytes: int) -> None:
        """A message has been taken from its mailbox, an item from its stream."""
        self._unload(key, nbytes)
        self._want(key)

    def _unload(self, key: Key, nbytes: int) -> None:
        left = self._loads.get(key, 0) - nbytes
        if left > 0:
            self._loads[key] = left
        else:
            self._loads.pop(key, None)

    def _want(self, key: Key) -> None:
        for held in self.lanes.get(key, ()):
            if held.wanted or not held.count:
                continue
            load = self._loads.get(key, 0)
            if load and load + held.nbytes > UNDER_WAY_BYTES:
                return
            held.wanted = True
            self._loads[key] = load + held.nbytes
            self.link.send(Want(0, held.first, held.count))

    def _pump(self, key: Key) -> None:
        while (lane := self.lanes.get(key)) and not lane[0].missing:
            held = lane.popleft()
            if not lane:
                del self.lanes[key]
            self._deliver(key, held)

    def _deliver(self, key: Key, held: _Held) -> None:
        link, frame = self.link, held.frame
        if isinstance(frame, Request) and frame.left_s is not None:
            frame.left_s -= link.node.loop.time() - held.came_s
        codec = link.node.codec
        codec.incoming = [blob for blob in held.blobs if blob is not None]
        taken = True
        try:
            if isinstance(frame, Request):
                taken = not serve(link, frame, _Load(self, key, held.nbytes) if held.nbytes else None)
            else:
                link.dispatch(frame)
        finally:
            codec.incoming = ()
        if isinstance(frame, Item) and held.nbytes:
            taken = not link.loaded(frame, partial(self.unload, key, held.nbytes))
        if taken and held.nbytes:
            self.unload(key, held.nbytes)

    # --- bytes, over the bulk connection ----------------------------------------------------------

    def place(self, blob: int, offset: int, nbytes: int) -> memoryview:
        coming = self._coming.get(blob)
        if not 0 < nbytes <= PIECE_BYTES or not 0 < blob <= self._announced:
            raise LinkLost("a piece of no blob that was announced")
        if coming is None:  # it was cancelled while its bytes were under way
            if len(self._scratch) < nbytes:
                self._scratch = memoryview(bytearray(PIECE_BYTES))
            return self._scratch[:nbytes]
        if offset != coming.got or offset + nbytes > coming.nbytes or not coming.held.wanted:
            raise LinkLost("a piece of a blob that does not belong there")
        if coming.view is None:
            coming.view = self._allocate(coming.nbytes)
        return coming.view[offset : offset + nbytes]

    def landed(self, blob: int, nbytes: int) -> None:
        coming = self._coming.get(blob)
        if coming is None or coming.view is None:
            return
        coming.got += nbytes
        if coming.got == coming.nbytes:
            self.link.send(Landed(0, blob))
            self._arrived(blob, coming, coming.view)

    def pieces_lost(self, why: str) -> None:
        self.link.freight.lost(why)

    def _allocate(self, nbytes: int) -> memoryview:
        node = self.link.node
        if not self.link.between_processes:
            return memoryview(bytearray(nbytes))
        if self._buffers is None:
            self._buffers = Pool(node.loop, node.context)
        size = size_class(nbytes)
        try:
            buffer = self._buffers.take(size) or Buffer(size)
        except (OSError, MemoryError, OverflowError) as error:
            raise LinkLost(f"no memory for a blob of {nbytes} bytes: {error}") from error
        return lend(buffer.memory, node.loop, node.context, partial(self._buffers.give, buffer))[:nbytes]

    def _arrived(self, id: int, coming: _Coming, view: memoryview) -> None:
        del self._coming[id]
        held = coming.held
        held.blobs[coming.at] = Blob(view)
        held.missing -= 1
        if not held.missing:
            self._pump(_key(held.frame))

    # --- bytes, through shared memory -------------------------------------------------------------

    def share(self, frame: Share) -> None:
        """The peer hears whether that segment could be opened here."""
        self.link.send(Shared(0, frame.id, self._open(frame)))

    def _open(self, frame: Share) -> bool:
        if not self.link.shares or len(self._segments) >= MAPPED_SEGMENTS or frame.id in self._segments:
            return False
        try:
            self._segments[frame.id] = open_segment(frame.pid, frame.fd, frame.name, frame.nbytes)
        except OSError:
            return False
        return True

    def unshare(self, id: int) -> None:
        self._segments.pop(id, None)

    def loaded(self, frame: Loaded) -> None:
        segment = self._segments.get(frame.segment)
        if segment is None or frame.segment in self._lent or not 0 < frame.blob <= self._announced:
            raise LinkLost("a blob in a segment that is not there or not free")
        coming = self._coming.get(frame.blob)
        if coming is None:  # it was cancelled meanwhile
            self.link.send(Back(0, frame.segment))
            return
        if coming.nbytes > len(segment) or coming.got or not coming.held.wanted:
            raise LinkLost("a blob that does not belong there")
        self._lent[frame.segment] = None
        back: Callable[[], Any] = partial(self._give_back, frame.segment)
        node = self.link.node
        self._arrived(frame.blob, coming, lend(segment, node.loop, node.context, back)[: coming.nbytes])

    def _give_back(self, segment: int) -> None:
        if self._lent.pop(segment, 0) is None:
            self.link.send(Back(0, segment))

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        self.lanes.clear()
        self._loads.clear()
        self._coming.clear()
        self._segments.clear()
        self._lent.clear()
        if self._buffers is not None:
            self._buffers.close()


def _key(frame: Request | Reply | Item | End | Failed | Any) -> Key:
    return (0, frame.to) if isinstance(frame, Request) else (1, frame.id)
