"""An actor in a process of its own, killed on the way; its stream goes on in the next one."""

from __future__ import annotations

import os
import signal

from primes import FinderConfig, Pid, Primes

from gyre.actors import ActorDied, AwaitChild, ChildSpec, Node, ProcessSpec, Supervisor, resumed, run


async def main() -> None:
    async with Node("processes") as node:
        finder = ProcessSpec(name="finder", actor="primes:Finder", config=FinderConfig())
        supervisor = await node.spawn(ChildSpec(name="finders", start=lambda: Supervisor([finder])))

        first = await supervisor.ask(AwaitChild(name="finder"))
        print("another process:", await first.ask(Pid()) != os.getpid())

        found = resumed(
            lambda left: supervisor.ask(AwaitChild(name="finder", after=left)), Primes(below=1000)
        )
        primes = []
        async for prime in found:
            primes.append(prime)
            if len(primes) == 100:
                os.kill(await first.ask(Pid()), signal.SIGKILL)
        print(f"{len(primes)} primes, none twice: {len(set(primes)) == len(primes)}, by {found.ref.label}")

        try:
            await first.ask(Pid())
        except ActorDied as error:
            print(error)


if __name__ == "__main__":
    run(main())
