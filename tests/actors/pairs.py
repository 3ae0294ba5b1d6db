"""Two nodes with sockets between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gyre.actors import Node, Ref
from gyre.actors.transport import TransportName
from tests.actors.test_links import TOKEN, carry


@dataclass
class Two:
    """`carry` takes a Ref of `b` to `a`, `carry_back` one of `a` to `b`."""

    a: Node
    b: Node

    def carry(self, ref: Ref) -> Ref:
        return carry(ref, self.b, self.a)

    def carry_back(self, ref: Ref) -> Ref:
        return carry(ref, self.a, self.b)


@asynccontextmanager
async def two_nodes(transport: TransportName) -> AsyncIterator[Two]:
    async with (
        Node(name="a", transport=transport, token=TOKEN) as a,
        Node(name="b", transport=transport, token=TOKEN) as b,
    ):
        await a.listen()
        await b.listen()
        yield Two(a, b)
