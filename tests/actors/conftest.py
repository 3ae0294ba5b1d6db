from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from gyre.actors import Actor, ChildSpec, Node, Ref
from gyre.actors.life import Life

ON_BOTH_LOOPS = ("test_links.py", "test_process.py")


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What touches sockets and processes is tested on both loops, the rest on the plain one."""
    plain = {"asyncio": asyncio.new_event_loop}
    return {**plain, "uvloop": uvloop.new_event_loop} if item.path.name in ON_BOTH_LOOPS else plain


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with Node(name="test") as node:
        yield node


async def start(node: Node, actor: Actor, name: str = "a", **options: object) -> Ref:
    """A temporary actor of this process."""
    spec = ChildSpec(name=name, start=lambda: actor, restart="temporary", **options)  # type: ignore[arg-type]
    return await node.spawn(spec)


def life(ref: Ref) -> Life:
    """The life behind a local Ref."""
    assert isinstance(ref.target, Life)
    return ref.target
