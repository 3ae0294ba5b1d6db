"""One machine serves, another finds its actor by name and runs a process there:

python two_machines.py serve 10.0.0.1 token               # prints its endpoint; writes the token file
python two_machines.py use tcp:10.0.0.1:40001 10.0.0.2 token
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from primes import Finder, FinderConfig, Pid, Primes

from gyre.actors import ChildSpec, Node, ProcessSpec, make_token, read_token, run


async def serve(address: str, token: bytes) -> None:
    async with Node("server", transport="tcp", where=address, token=token) as node:
        await node.spawn(ChildSpec(name="finder", start=lambda: Finder(FinderConfig())))
        print(await node.listen(), flush=True)
        await asyncio.Event().wait()


async def use(endpoint: str, address: str, token: bytes) -> None:
    async with Node("user", transport="tcp", where=address, token=token) as node:
        there = await node.reach(endpoint)
        finder = await node.find("finder", at=there)
        assert finder is not None
        print("found:", [prime async for prime in finder.stream(Primes(below=20))])

        spec = ProcessSpec(name="mine", actor="primes:Finder", config=FinderConfig(first=10), node=there)
        mine = await node.spawn(spec)  # supervised from here, as any child
        print("run there:", [prime async for prime in mine.stream(Primes(below=20))])
        print("another process:", await mine.ask(Pid()) not in (os.getpid(), await finder.ask(Pid())))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", address, path]:
            run(serve(address, make_token(Path(path))))
        case ["use", endpoint, address, path]:
            run(use(endpoint, address, read_token(Path(path))))
        case _:
            sys.exit(__doc__)
