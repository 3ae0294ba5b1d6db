from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from gyre.actors import Actor, ChildSpec, Node, Ref
from gyre.actors.life import Life
from tests.actors.world import TRANSPORTS, World, simulated_loop

ON_BOTH_LOOPS = ("test_process.py", "test_conformance.py", "test_sockets.py")
# By far the most tests, on top of what is tested on both: GYRE_BOTH_LOOPS=1 runs them on asyncio's loop too.
ON_UVLOOP = ("test_blobs.py", "test_links.py", "test_ucx.py")
ON_ALL_TRANSPORTS = ("test_blobs.py", "test_links.py", "test_conformance.py")


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """What touches sockets and processes is tested on both loops, the rest on the plain one."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {}
    if item.path.name not in ON_UVLOOP or "GYRE_BOTH_LOOPS" in os.environ:
        factories["asyncio"] = asyncio.new_event_loop
    if item.path.name in ON_BOTH_LOOPS + ON_UVLOOP:
        factories["uvloop"] = uvloop.new_event_loop
    if item.path.name in ON_ALL_TRANSPORTS:
        factories["simulated"] = simulated_loop
    return factories


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The simulated transport is for the simulated loop, and the others are not."""
    items[:] = [item for item in items if _fits(item)]


def _fits(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return (params.get("world") == "simulated") == (params.get("_asyncio_loop_factory") is simulated_loop)


@pytest.fixture(params=TRANSPORTS)
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


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


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Lets others run until that holds: for what has no event."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)
