"""A cell's process group, over a real store. Two ranks: test_rank_workers.py."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import torch
import torch.distributed as dist

from gyre.actors import ChildSpec, Node
from gyre.cell.group import CellGroup
from gyre.cell.store import GetStoreAddress, StoreActor, StoreAddress, StoreConfig

CPU = torch.device("cpu")


@pytest.fixture
async def store() -> AsyncIterator[StoreAddress]:
    async with Node(name="test") as node:
        ref = await node.spawn(ChildSpec(name="store", start=lambda: StoreActor(StoreConfig())))
        yield await ref.ask(GetStoreAddress())


def open_things() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_a_group_is_rebuilt_again_and_again(store: StoreAddress) -> None:
    group = CellGroup(0, 1, CPU, 20.0)
    try:
        seen = []
        for generation in range(20):
            group.rebuild(store.host, store.port, f"cell0/life1/group{generation}")
            assert dist.get_world_size() == 1
            assert group.sum(2.5) == 2.5
            seen.append(open_things())
        # In the end no more than at first: what others leave in this process may come and go.
        for first, last in zip(zip(*seen[2:7], strict=True), zip(*seen[-5:], strict=True), strict=True):
            assert min(last) <= max(first), seen
    finally:
        group.drop()
    assert not dist.is_initialized()


def test_a_dropped_group_may_be_dropped_again() -> None:
    group = CellGroup(0, 1, CPU, 20.0)
    group.drop()
    group.drop()


def test_one_rank_has_nothing_to_shard() -> None:
    assert CellGroup(0, 1, CPU, 20.0).mesh() is None


def test_a_rank_that_never_comes_is_an_error(store: StoreAddress) -> None:
    group = CellGroup(0, 2, CPU, 0.5)
    with pytest.raises(dist.DistError):
        group.rebuild(store.host, store.port, "cell0/life1/group1")
    assert not dist.is_initialized()


def test_a_store_that_is_gone_is_an_error() -> None:
    group = CellGroup(0, 1, CPU, 0.5)
    with pytest.raises(dist.DistError):
        group.rebuild("127.0.0.1", 1, "cell0/life1/group1")


async def test_every_store_has_a_port_of_its_own() -> None:
    async with Node(name="test") as node:
        ports = set()
        for name in ("a", "b"):
            ref = await node.spawn(ChildSpec(name=name, start=lambda: StoreActor(StoreConfig())))
            ports.add((await ref.ask(GetStoreAddress())).port)
    assert len(ports) == 2
