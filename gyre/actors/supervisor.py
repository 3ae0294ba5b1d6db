"""An actor that only keeps others alive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gyre.actors.actor import Actor
from gyre.actors.errors import ActorError
from gyre.actors.handlers import handles
from gyre.actors.log import log
from gyre.actors.messages import Ask, Down, Restarted, Tell
from gyre.actors.ref import Ref
from gyre.actors.specs import Spec, Strategy
from gyre.actors.supervision import Supervision

# A follower that takes nothing for so long misses a Restarted.
FOLLOWER_WAIT_S = 1.0


class WhereIs(Ask[Ref | None], frozen=True, kw_only=True):
    """To a Supervisor: its living child of that name."""

    name: str


class AwaitChild(Ask[Ref], frozen=True, kw_only=True):
    """To a Supervisor: its child of that name as soon as it lives; with `after`, a later life than that one.
    LookupError where it was never given such a child."""

    name: str
    after: Ref | None = None


class Follow(Tell, frozen=True, kw_only=True):
    """To a Supervisor: send `watcher` a `Restarted` for each child that lives anew."""

    watcher: Ref


class Supervisor(Actor):
    """Starts `children` in order, restarts them by `strategy`, stops them in reverse. When more than
    `max_restarts` are needed within `window_s` it fails, which its own parent handles."""

    def __init__(
        self,
        children: Sequence[Spec],
        strategy: Strategy = "one_for_one",
        max_restarts: int = 3,
        window_s: float = 60.0,
    ) -> None:
        self._children = tuple(children)
        self._followers: dict[Ref, None] = {}
        self._anew = asyncio.Condition()
        self.supervision = Supervision(strategy, max_restarts, window_s)

    async def started(self) -> None:
        for spec in self._children:
            await self.context.spawn(spec)

    @handles(WhereIs)
    async def where_is(self, message: WhereIs) -> Ref | None:
        return self.context.child(message.name)

    @handles(AwaitChild, concurrent=True)
    async def await_child(self, message: AwaitChild) -> Ref:
        if message.name not in {spec.name for spec in self._children}:
            raise LookupError(f"{self.context.ref.name} has no child {message.name!r}")
        async with self._anew:
            while (ref := self.context.child(message.name)) is None or ref == message.after:
                await self._anew.wait()
        return ref

    @handles(Follow)
    async def follow(self, message: Follow) -> None:
        self._followers[message.watcher] = None
        self.context.monitor(message.watcher)

    @handles(Down)
    async def follower_down(self, message: Down) -> None:
        self._followers.pop(message.ref, None)

    @handles(Restarted)
    async def restarted(self, message: Restarted) -> None:
        async with self._anew:
            self._anew.notify_all()
        for watcher in [*self._followers]:
            try:
                await watcher.tell(message, timeout_s=FOLLOWER_WAIT_S)
            except ActorError as error:
                log.warning("restart_not_told", to=watcher.label, child=message.name, why=str(error))
