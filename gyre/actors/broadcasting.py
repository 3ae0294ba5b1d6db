"""One message to many actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

from gyre.actors.errors import MailboxFull
from gyre.actors.messages import Ask, Message, Tell
from gyre.actors.ref import ASK_TIMEOUT_S, Ref
from gyre.actors.remote import RemoteTarget
from gyre.actors.wire import Body

R = TypeVar("R")


async def broadcast(refs: Iterable[Ref], message: Tell, timeout_s: float = ASK_TIMEOUT_S) -> None:
    """Tells all of them; it is encoded once. Those whose mailbox has room have it at once, the others are
    waited for together: an ExceptionGroup of MailboxFull for those that still had none after `timeout_s`.
    The dead are no error, as with `tell`. BadMessage where it cannot be encoded: nobody has got it then."""
    copies = _Copies(message, refs)
    full = []
    for ref in copies.refs:
        if ref.target.has_room(ref) and not copies.laden:
            await copies.tell(ref, timeout_s)
        else:
            full.append(ref)
    if full:
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(_refusal(copies.tell(ref, timeout_s))) for ref in full]
        if refusals := [refusal for task in waiting if (refusal := task.result()) is not None]:
            raise ExceptionGroup(f"{len(refusals)} of {len(copies.refs)} had no room", refusals)


async def ask_all(
    refs: Iterable[Ref], message: Ask[R], timeout_s: float = ASK_TIMEOUT_S
) -> list[R | Exception]:
    """Asks all of them at once; it is encoded once. The answers in the order of `refs`; where an ask would
    have raised (RemoteError, AskTimeout, ActorDied, ...) its error stands in the answer's place, so that one
    that fails costs no other's answer. Cancelling it cancels all handlers. BadMessage as with `broadcast`."""
    copies = _Copies(message, refs)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(_result(copies.ask(ref, timeout_s))) for ref in copies.refs]
    return [task.result() for task in asking]


class _Copies:
    """A message, encoded once for all that are elsewhere; one with blobs (`laden`) for each of them, and it
    takes its time to leave."""

    def __init__(self, message: Message, refs: Iterable[Ref]) -> None:
        self.refs = [*refs]
        self._message = message
        targets = {ref.target for ref in self.refs}
        self._encoded: dict[RemoteTarget, Body | None] = {
            target: target.encode(message) for target in targets if isinstance(target, RemoteTarget)
        }
        self.laden = None in self._encoded.values()

    async def tell(self, ref: Ref, timeout_s: float) -> None:
        target = ref.target
        if isinstance(target, RemoteTarget):
            await target.tell(ref, self._message, timeout_s, self._encoded[target])
        else:
            await target.tell(ref, self._message, timeout_s)

    async def ask(self, ref: Ref, timeout_s: float) -> Any:
        target = ref.target
        if isinstance(target, RemoteTarget):
            return await target.ask(ref, self._message, timeout_s, self._encoded[target])
        return await target.ask(ref, self._message, timeout_s)


async def _refusal(telling: Awaitable[None]) -> MailboxFull | None:
    try:
        await telling
    except MailboxFull as error:
        return error
    return None


async def _result(asking: Awaitable[Any]) -> Any:
    try:
        return await asking
    except Exception as error:
        return error
