"""What travels between nodes: frames, and how values become bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gyre.actors.envelope import Waiter
from gyre.actors.errors import BadMessage, ExitReason, Failure
from gyre.actors.messages import answer_type
from gyre.actors.ref import Ref

MAX_FRAME_BYTES = 64 * 2**20

Position = Annotated[int, msgspec.Meta(ge=0)]

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
)


class Codec:
    """Values to msgpack and back, Refs and Paths included. `bind` makes the Ref that works here."""

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

    def encode(self, value: Any) -> bytes:
        """BadMessage where it holds what cannot travel."""
        try:
            return self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise BadMessage(f"{type(value).__qualname__} cannot be encoded: {error}") from error

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
        if issubclass(type, Path):
            return type(value)
        raise TypeError(f"a {type.__qualname__} cannot travel in a message")
