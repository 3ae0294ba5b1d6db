"""An actor that dies now and then, its next lives, and one that watches."""

from __future__ import annotations

import asyncio

from gyre.actors import (
    Actor,
    ActorDied,
    Ask,
    AwaitChild,
    ChildSpec,
    Down,
    Node,
    Ref,
    Supervisor,
    Tell,
    handles,
    run,
)


class Divide(Ask[float], frozen=True, kw_only=True):
    a: float
    b: float


class Forget(Tell, frozen=True, kw_only=True):
    """A tell has no asker who could be given its error: what it raises is the actor's crash."""


class Divider(Actor):
    @handles(Divide)
    async def divide(self, message: Divide) -> float:
        return message.a / message.b

    @handles(Forget)
    async def forget(self, _: Forget) -> None:
        raise RuntimeError("everything is forgotten")


class Watch(Tell, frozen=True, kw_only=True):
    ref: Ref


class Watcher(Actor):
    def __init__(self, seen: asyncio.Queue[str]) -> None:
        self.seen = seen

    @handles(Watch)
    async def watch(self, message: Watch) -> None:
        self.context.monitor(message.ref)

    @handles(Down)
    async def down(self, message: Down) -> None:
        self.seen.put_nowait(f"{message.ref.label} died: {message.reason.brief}")


async def main() -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    async with Node("supervision") as node:
        workers = Supervisor([ChildSpec(name="divider", start=Divider)], max_restarts=3, window_s=10.0)
        supervisor = await node.spawn(ChildSpec(name="workers", start=lambda: workers))
        watcher = await node.spawn(ChildSpec(name="watcher", start=lambda: Watcher(seen)))

        divider = await supervisor.ask(AwaitChild(name="divider"))
        await watcher.tell(Watch(ref=divider))
        try:
            await divider.ask(Divide(a=1, b=0))
        except Exception as error:  # the asker's, and the actor lives on
            print(error)
        print("still there:", await divider.ask(Divide(a=1, b=2)))

        await divider.tell(Forget())
        print(await seen.get())
        try:
            await divider.ask(Divide(a=1, b=2))
        except ActorDied:
            print("a ref names one life")
        after = await supervisor.ask(AwaitChild(name="divider", after=divider))
        print(f"{after.label} answers:", await after.ask(Divide(a=1, b=2)))


if __name__ == "__main__":
    run(main())
