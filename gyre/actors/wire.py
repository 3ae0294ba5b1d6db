"""What travels between nodes: frames, and how values become bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from gyre.actors.blob import Blob
from gyre.actors.envelope import Waiter
from gyre.actors.errors import BadMessage, ExitReason, Failure
from gyre.actors.messages import answer_type
from gyre.actors.ref import Ref

MAX_FRAME_BYTES = 64 * 2**20

Position = Annotated[int, msgspec.Meta(ge=0)]

# Blobs of one message, all together; so much of them travels in its frame.
MAX_BLOBS = 1024
MAX_BLOBS_BYTES = 2**30
INLINE_BYTES = 64 * 1024

# Kinds of request.
TELL, ASK, STREAM = 0, 1, 2

# What a decoder raises, its hooks included.
UNDECODABLE = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)

# A body is encoded as part of its frame and decoded on its own, when its type is known.
Body = msgspec.Raw


class Frame(msgspec.Struct, array_like=True, gc=False, tag_field="_", kw_only=False):
    """`seq` counts a link's frames each way from 1: a frame lost, repeated or replayed ends the link."""

    seq: int


class Request(Frame, tag=1):
    """The envelope of a message: id, sender and its incarnation, seconds left (of an ask), cause, position
    in a stream, call chain. `kind`: TELL, ASK or STREAM."""

    kind: int
    id: int
    to: int
    sender: int
    sender_incarnation: int
    left_s: float | None
    cause: int
    position: Position
    chain: tuple[Waiter, ...]
    type: str
    body: Body


class Reply(Frame, tag=2):
    id: int
    body: Body


class Failed(Frame, tag=3):
    """Ends an ask or a stream."""

    id: int
    failure: Failure


class Item(Frame, tag=4):
    id: int
    position: int
    body: Body


class End(Frame, tag=5):
    """A stream's."""

    id: int


class Cancel(Frame, tag=6):
    """The asker or the consumer of `id` is gone."""

    id: int


class Taken(Frame, tag=7):
    """So many more messages have left the mailbox of `to`."""

    to: int
    count: int


class Demand(Frame, tag=8):
    """So many more items of the stream `id` may be sent."""

    id: int
    count: int


class Watch(Frame, tag=9):
    """Send a Gone when this life ends; with `on` false, no longer."""

    to: int
    on: bool


class Gone(Frame, tag=10):
    id: int
    reason: ExitReason


class Booted(Frame, tag=11):
    """A child process to its parent: its actor has started, or could not."""

    id: int
    endpoint: str
    reason: ExitReason | None


class Ended(Frame, tag=12):
    """A child process to its parent: its actor's life is over, the process' own end follows."""

    reason: ExitReason


class Shutdown(Frame, tag=13):
    """A parent to its child process: stop the actor, then end."""


class Beat(Frame, tag=14):
    """A sign of life, where there is nothing else to say."""


class Tie(Frame, tag=15):
    """The life `id` of the sender is linked with `to`; with `on` false, no longer."""

    to: int
    id: int
    name: str
    incarnation: int
    on: bool


class Parcel(NamedTuple):
    """A blob of a message. Its bytes where they are few; else it has the next number of those that follow."""

    nbytes: int
    data: bytes


class Laden(Frame, tag=32):
    """A Request, Reply or Item with blobs: `frame`, encoded, names them by their place in `parcels`."""

    parcels: tuple[Parcel, ...]
    frame: msgspec.Raw


class Want(Frame, tag=33):
    """There is room for `count` blobs from number `first` on: send them."""

    first: int
    count: int


class Loaded(Frame, tag=34):
    """The blob lies at the start of that shared segment, the receiver's until it is given Back."""

    blob: int
    segment: int


class Landed(Frame, tag=40):
    """The blob has come over the bulk connection, all of it."""

    blob: int


class Share(Frame, tag=35):
    """A new segment, for the receiver to open as `/proc/PID/fd/FD`."""

    id: int
    pid: int
    fd: int
    name: str
    nbytes: int


class Shared(Frame, tag=36):
    """Whether the segment could be opened."""

    id: int
    ok: bool


class Back(Frame, tag=37):
    """Nobody uses the segment here any more."""

    id: int


class Unshare(Frame, tag=38):
    """The segment will not be used again."""

    id: int


class Bulk(Frame, tag=39):
    """From who dialled the link: the bulk connection stands. To it: dial that connection."""


class Seek(Frame, tag=16):
    """Follow what the sender has asked you with `ask`: does it wait for a handler of `chain`? The ask
    `ask_id` of that chain waits at the first node of `route`, those on the way so far, in the mailbox of
    `actor_id`. `way` names the actors on it."""

    ask: int
    actor_id: int
    ask_id: int
    chain: tuple[Waiter, ...]
    way: tuple[str, ...]
    route: tuple[str, ...]


class Deadlock(Frame, tag=17):
    """It does, so that the ask will never be answered: to the last of `route`, and on to the first."""

    actor_id: int
    ask_id: int
    route: tuple[str, ...]
    cycle: tuple[str, ...]


AnyFrame = (
    Request
    | Reply
    | Failed
    | Item
    | End
    | Cancel
    | Taken
    | Demand
    | Watch
    | Gone
    | Booted
    | Ended
    | Shutdown
    | Beat
    | Tie
    | Laden
    | Want
    | Loaded
    | Landed
    | Share
    | Shared
    | Back
    | Unshare
    | Bulk
    | Seek
    | Deadlock
)


class Codec:
    """Values to msgpack and back, Refs, Paths and Blobs included. `bind` makes the Ref that works here. A
    Blob is encoded as its place in `outgoing`, to which it is added, and decoded as what is there in
    `incoming`: whoever sends and receives frames sees to both."""

    def __init__(
        self, node_id: str, endpoint: Callable[[], str], bind: Callable[[str, str, int, str, int], Ref]
    ) -> None:
        self._node_id = node_id
        self._endpoint = endpoint
        self._bind = bind
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._to_wire)
        self._frames = msgspec.msgpack.Decoder(AnyFrame)
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
        self._answers: dict[type, msgspec.msgpack.Decoder[Any]] = {}
        self.outgoing: list[Blob] = []
        self.incoming: Sequence[Blob] = ()

    def encode(self, value: Any) -> bytes:
        """BadMessage where it holds what cannot travel."""
        try:
            return self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self.outgoing = []
            raise BadMessage(f"{type(value).__qualname__} cannot be encoded: {error}") from error

    def encode_whole(self, value: Any) -> bytes:
        """The same of what has no frame: BadMessage where it holds a Blob too."""
        data = self.encode(value)
        if self.take_blobs():
            raise BadMessage(f"a Blob cannot travel in a {type(value).__qualname__}")
        return data

    def take_blobs(self) -> list[Blob]:
        """Those of what was encoded last."""
        blobs, self.outgoing = self.outgoing, []
        return blobs

    def decoder(self, type: Any) -> msgspec.msgpack.Decoder[Any]:
        """Kept per type; TypeError where msgspec cannot decode such a type."""
        decoder = self._decoders.get(type)
        if decoder is None:
            decoder = msgspec.msgpack.Decoder(type, dec_hook=self._from_wire)
            self._decoders[type] = decoder
        return decoder

    def answers(self, message: type) -> msgspec.msgpack.Decoder[Any]:
        """Of what a message of that type is answered with."""
        decoder = self._answers.get(message)
        if decoder is None:
            decoder = self._answers[message] = self.decoder(answer_type(message))
        return decoder

    def decode(self, type: Any, body: Body) -> Any:
        try:
            return (self._decoders.get(type) or self.decoder(type)).decode(body)
        except UNDECODABLE as error:
            raise BadMessage(f"this is no {getattr(type, '__qualname__', type)}: {error}") from error

    def frame(self, payload: memoryview) -> AnyFrame:
        """BadMessage where it is none."""
        try:
            return self._frames.decode(payload)
        except UNDECODABLE as error:
            raise BadMessage(f"not a frame: {error}") from error

    def _to_wire(self, value: Any) -> Any:
        if isinstance(value, Ref):
            endpoint = self._endpoint() if value.node_id == self._node_id else value.endpoint
            return (value.node_id, endpoint, value.id, value.name, value.incarnation)
        if isinstance(value, Blob):
            self.outgoing.append(value)
            return len(self.outgoing) - 1
        if isinstance(value, Path):
            return str(value)
        raise TypeError(f"a {type(value).__qualname__} cannot travel in a message")

    def _from_wire(self, type: Any, value: Any) -> Any:
        if type is Ref:
            try:
                node_id, endpoint, id, name, incarnation = value
            except (TypeError, ValueError):
                raise ValueError("not a Ref") from None
            return self._bind(str(node_id), str(endpoint), int(id), str(name), int(incarnation))
        if type is Blob:
            if not isinstance(value, int) or not 0 <= value < len(self.incoming):
                raise ValueError("a Blob that did not come")
            return self.incoming[value]
        if issubclass(type, Path):
            return type(value)
        raise TypeError(f"a {type.__qualname__} cannot travel in a message")
