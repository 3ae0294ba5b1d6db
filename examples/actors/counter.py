import asyncio

from gyre.actors import Actor, Ask, ChildSpec, Node, handles


class Add(Ask[int], frozen=True, kw_only=True):
    amount: int


class Counter(Actor):
    total = 0

    @handles(Add)
    async def add(self, message: Add) -> int:
        self.total += message.amount
        return self.total


async def main() -> None:
    async with Node("counting") as node:
        counter = await node.spawn(ChildSpec(name="counter", start=Counter))
        print([await counter.ask(Add(amount=number)) for number in (1, 2, 3)])


asyncio.run(main())
