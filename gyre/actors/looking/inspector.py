"""The tree of a node's actors and of those in its child processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from gyre.actors.errors import ActorDied, ActorError, AskTimeout
from gyre.actors.life import Life
from gyre.actors.looking.messages import Inspect
from gyre.actors.looking.probes import handling
from gyre.actors.looking.reports import (
    ActorReport,
    DeadLetterReport,
    FailureReport,
    NodeReport,
    NoSuchActor,
    State,
)
from gyre.actors.specs import ProcessSpec

if TYPE_CHECKING:
    from gyre.actors.family import Child
    from gyre.actors.node import Node

CHILDREN_SHOWN = 200
DEAD_LETTERS_SHOWN = 20
SUMMARY_FIELDS = 50
LONGEST_VALUE = 500
# Of the time that a node has, what those that it asks have to answer, and what it waits for them.
THEIRS, WAIT = 0.8, 0.9


class Inspector:
    """One look."""

    def __init__(self, node: Node, message: Inspect) -> None:
        self._node = node
        self._message = message
        self._elsewhere: dict[str, ActorReport] = {}

    async def report(self) -> ActorReport:
        """NoSuchActor where the path leads nowhere."""
        self._node.probes.count()
        message = self._message
        names = [name for name in message.path.split("/") if name]
        life = self._node.life(message.life) if message.life else None
        if message.life and life is None:
            raise NoSuchActor(message.under, "", [])
        if not names:
            return await self._whole(life)
        children, path = (self._node.family.children if life is None else life.children), message.under
        for at, name in enumerate(names):
            child = children.get(name)
            if child is None:
                raise NoSuchActor(_join(path, name), path, [*children])
            running, rest = child.running, names[at + 1 :]
            if not rest:
                await self._ask_elsewhere(dict(_descend({name: child}, path)))
                return self._of_child(child, _join(path, name))
            path = _join(path, name)
            if not isinstance(running, Life):
                return await self._ask(child, path, "/".join(rest))
            children = running.children
        raise AssertionError("unreachable")

    async def _whole(self, life: Life | None) -> ActorReport:
        under = self._message.under
        if life is None:
            children = self._node.family.children
            await self._ask_elsewhere(dict(_descend(children, under)))
            return self._with_children(
                ActorReport(path=under, kind="node", state="running", node=self._of_node()), children
            )
        await self._ask_elsewhere(dict(_descend(life.children, under)))
        return msgspec.structs.replace(self._of_life(life, under), node=self._of_node())

    # --- other processes --------------------------------------------------------------------------

    async def _ask_elsewhere(self, children: Mapping[str, Child]) -> None:
        async def ask(path: str, child: Child) -> None:
            self._elsewhere[path] = await self._ask(child, path, "")

        async with asyncio.TaskGroup() as tasks:
            for path, child in children.items():
                if child.running is not None and not isinstance(child.running, Life):
                    tasks.create_task(ask(path, child))

    async def _ask(self, child: Child, path: str, rest: str) -> ActorReport:
        running = child.running
        if running is None:
            return self._of_child(child, path)
        within_s = self._message.within_s
        message = Inspect(path=rest, life=running.ref.id, under=path, within_s=within_s * THEIRS)
        try:
            found = await self._node.desk(running.ref).ask(message, timeout_s=within_s * WAIT)
        except NoSuchActor:
            if rest:
                raise
            return self._bare(child, path, "ended", "its life is over")
        except AskTimeout:
            return self._bare(child, path, "unanswered", f"no answer within {within_s * WAIT:.3g} s")
        except ActorDied as error:
            return self._bare(child, path, "ended", error.reason.brief)
        except ActorError as error:
            return self._bare(child, path, "unanswered", " ".join(str(error).split()))
        return found if rest else self._as_child(found, child)

    # --- this process -----------------------------------------------------------------------------

    def _of_child(self, child: Child, path: str) -> ActorReport:
        running = child.running
        if running is None:
            return self._bare(child, path, "starting" if child.last_exit is None else "restarting", "")
        if isinstance(running, Life):
            return self._as_child(self._of_life(running, path), child)
        return self._elsewhere.get(path) or self._bare(child, path, "starting", "")

    def _bare(self, child: Child, path: str, state: State, why: str) -> ActorReport:
        kind = child.spec.actor if isinstance(child.spec, ProcessSpec) else ""
        report = ActorReport(path=path, kind=kind, state=state, why=why, incarnation=child.incarnation)
        return self._as_child(report, child)

    def _as_child(self, report: ActorReport, child: Child) -> ActorReport:
        """With what its parent knows."""
        last = report.last_error
        if last is None and child.last_exit is not None:
            reason, at_s = child.last_exit
            last = FailureReport(
                error=str(reason),
                message="",
                ago_s=self._node.loop.time() - at_s,
                traceback=reason.traceback,
            )
        return msgspec.structs.replace(report, restarts=max(0, child.incarnation - 1), last_error=last)

    def _of_life(self, life: Life, path: str) -> ActorReport:
        probe = self._node.probes.of(life)
        mailbox, last = life.mailbox, life.last_error
        report = ActorReport(
            path=path,
            kind=f"{type(life.actor).__module__}:{type(life.actor).__qualname__}",
            state=_state(life),
            incarnation=life.ref.incarnation,
            waiting=len(mailbox.queue or ()) + len(mailbox.system or ()),
            writers=len(mailbox.writers or ()),
            capacity=mailbox.capacity,
            tasks=life.tasks,
            handling=handling(life, self._node.probes),
            last_error=None
            if last is None
            else FailureReport(
                error=last.error,
                message=last.message,
                ago_s=self._node.loop.time() - last.at_s,
                traceback=last.traceback,
            ),
            summary=_summary(life),
            handlers=() if probe is None else probe.rows(),
        )
        return self._with_children(report, life.children)

    def _with_children(self, report: ActorReport, children: Mapping[str, Child]) -> ActorReport:
        shown = [
            self._of_child(child, _join(report.path, name))
            for name, child in itertools.islice(children.items(), CHILDREN_SHOWN)
        ]
        hidden = len(children) - len(shown)
        return msgspec.structs.replace(report, children=tuple(shown), hidden=hidden)

    def _of_node(self) -> NodeReport:
        node = self._node
        letters, now = node.dead_letters, node.loop.time()
        return NodeReport(
            name=node.name,
            id=node.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            endpoint=node.endpoint,
            up_s=now - node.began_s,
            counted_s=node.probes.counted_s,
            actors=len(node.lives) - 1,
            peers=tuple(sorted(link.peer_name for link in node.links.all())),
            dead_letters=letters.count,
            last_dead_letters=tuple(
                DeadLetterReport(to=one.to, message=one.message, why=one.why, ago_s=now - one.at_s)
                for one in [*letters.last][-DEAD_LETTERS_SHOWN:]
            ),
        )


def _descend(children: Mapping[str, Child], path: str) -> Iterator[tuple[str, Child]]:
    """All that are shown, as deep as this process goes."""
    for name, child in itertools.islice(children.items(), CHILDREN_SHOWN):
        below = _join(path, name)
        yield below, child
        if isinstance(child.running, Life):
            yield from _descend(child.running.children, below)


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _state(life: Life) -> State:
    if life.exit is not None:
        return "stopping"
    return "running" if life.ready else "starting"


def _summary(life: Life) -> dict[str, Any]:
    """What the actor says of itself, cut where it is too much; an error in it harms nobody."""
    try:
        plain = msgspec.to_builtins(dict(life.actor.summary()), enc_hook=str, str_keys=True)
    except Exception as error:
        return {"summary_failed": f"{type(error).__name__}: {error}"[:LONGEST_VALUE]}
    return {name: _cut(value) for name, value in itertools.islice(plain.items(), SUMMARY_FIELDS)}


def _cut(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else str(value)
    return value if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
