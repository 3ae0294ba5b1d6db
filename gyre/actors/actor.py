"""What a user writes: an Actor with handlers; what it is given: its Context."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, final

from gyre.actors.envelope import CURRENT
from gyre.actors.handlers import HandlerTable
from gyre.actors.messages import Tell
from gyre.actors.ref import Ref
from gyre.actors.specs import Spec
from gyre.actors.streams import Sink
from gyre.actors.supervision import Supervision

if TYPE_CHECKING:
    from gyre.actors.background import Timer
    from gyre.actors.life import Life
    from gyre.actors.node import Node

T = TypeVar("T")


class Actor:
    """State that only its own handlers touch. Make no I/O in `__init__`: there is no context yet."""

    context: Context
    supervision: Supervision = Supervision()
    table: ClassVar[HandlerTable]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.table = HandlerTable(cls)

    async def started(self) -> None:
        """Before the first message; the context is set. What it raises is the start's failure."""

    async def stopping(self) -> None:
        """After the last message, also after a crash, within `shutdown_s`; children still live."""

    def summary(self) -> Mapping[str, Any]:
        """Its state in a few words, for those who look: quick, plain data, nothing secret."""
        return {}


Actor.table = HandlerTable(Actor)


@final
class Context:
    """An actor's way to its runtime."""

    __slots__ = ("_life",)

    def __init__(self, life: Life) -> None:
        self._life = life

    @property
    def ref(self) -> Ref:
        return self._life.ref

    @property
    def node(self) -> Node:
        return self._life.node

    @property
    def name(self) -> str:
        return self._life.ref.name

    @property
    def incarnation(self) -> int:
        """1 for the first life under this name, then one more each."""
        return self._life.ref.incarnation

    @property
    def position(self) -> int:
        """In a Stream's handler: the position of the item that its consumer wants first."""
        current = CURRENT.get()
        if current is None or not current.handler.streams:
            raise RuntimeError("only the handler of a Stream has a position")
        return cast(Sink, current.answer).start

    async def spawn(self, spec: Spec) -> Ref:
        """Starts a child and returns when its `started` has. It is supervised by this actor's
        `supervision`, and stopped with it. Raises SpawnFailed."""
        return await self._life.family.spawn(spec)

    async def stop_child(self, ref: Ref) -> None:
        """Stops a child and forgets it; returns when it is gone."""
        await self._life.family.stop(ref.name)

    def child(self, name: str) -> Ref | None:
        """The living child of that name."""
        return self._life.family.lookup(name)

    def stop(self) -> None:
        """Ends this actor after the message at hand, with reason `normal`."""
        self._life.stop_itself()

    def monitor(self, ref: Ref) -> None:
        """A `Down` will come when that life ends, or at once if it has."""
        self._life.monitor(ref)

    def demonitor(self, ref: Ref) -> None:
        """No `Down` will come for it."""
        self._life.bonds.demonitor(ref)

    def link(self, ref: Ref) -> None:
        """From now on, when one of the two dies abnormally the other does too, with that for its cause, and
        at once if it has. Also when the connection between their processes is lost."""
        self._life.bonds.link(ref)

    def unlink(self, ref: Ref) -> None:
        """Takes back a link, whoever of the two made it."""
        self._life.bonds.unlink(ref)

    def tell_after(self, delay_s: float, message: Tell) -> Timer:
        """Puts `message` into this actor's own mailbox later."""
        return self._life.tell_after(delay_s, message)

    def run(self, coroutine: Coroutine[Any, Any, T], *, name: str = "") -> asyncio.Task[T]:
        """A background task of this actor: cancelled when it stops; its exception crashes it."""
        return self._life.run(coroutine, name)
