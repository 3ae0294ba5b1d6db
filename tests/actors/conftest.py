from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gyre.actors import Actor, ChildSpec, Node, Ref
from gyre.actors.life import Life


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
