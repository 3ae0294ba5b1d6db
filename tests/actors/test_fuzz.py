"""A peer that holds the token and sends nonsense: its link ends, nothing else does."""

from __future__ import annotations

import asyncio
import os
import random

import msgspec
import pytest

from gyre.actors import BadMessage, ExitReason, LinkLost, Node
from gyre.actors.envelope import Waiter
from gyre.actors.errors import Failure
from gyre.actors.link import Link
from gyre.actors.wire import (
    Back,
    Booted,
    Bulk,
    Cancel,
    Codec,
    Deadlock,
    Demand,
    End,
    Ended,
    Failed,
    Frame,
    Gone,
    Item,
    Laden,
    Landed,
    Loaded,
    Parcel,
    Reply,
    Request,
    Seek,
    Share,
    Shared,
    Shutdown,
    Taken,
    Tie,
    Unshare,
    Want,
    Watch,
)
from tests.actors.conftest import life, start
from tests.actors.zoo import Add, Counter


def frames(actor_id: int) -> list[Frame]:
    body: object = Add(amount=1)
    reason = ExitReason(kind="exit")
    name = "tests.actors.zoo:Add"
    return [
        *(Request(1, kind, 7, actor_id, 0, 0, 1.0, 0, 0, (), name, body) for kind in (0, 1, 2, 3)),  # type: ignore[arg-type]
        Request(1, 1, 7, 5, 0, 0, None, 0, 0, (("n", 1, 2, "x"),), name, body),  # type: ignore[arg-type]
        Reply(1, 7, body),  # type: ignore[arg-type]
        Failed(1, 7, Failure(type_name="x")),
        Item(1, 7, 0, body),  # type: ignore[arg-type]
        End(1, 7),
        Cancel(1, 7),
        Taken(1, actor_id, 3),
        Demand(1, 7, 3),
        Watch(1, actor_id, True),
        Watch(1, 5, True),
        Gone(1, actor_id, reason),
        Booted(1, 5, "unix:/x", None),
        Ended(1, reason),
        Shutdown(1),
        Tie(1, 5, 6, "far", 1, True),  # of nobody here: whoever is linked with a peer dies with the link
        Tie(1, actor_id, 6, "far", 1, False),
        Seek(1, 7, actor_id, 8, (Waiter("n", 1, 2, "l"),), ("l",), ("n",)),
        Deadlock(1, actor_id, 8, ("n", "m"), ("l", "l")),
        *blob_frames(name, actor_id, body),
    ]


def blob_frames(name: str, actor_id: int, body: object) -> list[Frame]:
    inner = Codec("x", str, None).encode(Request(1, 1, 7, actor_id, 0, 0, 1.0, 0, 0, (), name, body))  # type: ignore[arg-type]
    return [
        Laden(1, (Parcel(3, b"abc"), Parcel(10**6, b""), Parcel(0, b"")), msgspec.Raw(inner)),
        Laden(1, (), msgspec.Raw(inner)),
        Want(1, 1, 3),
        Loaded(1, 1, 1),
        Landed(1, 1),
        Share(1, 1, os.getpid(), 0, "gyre-x", 10**6),
        Shared(1, 1, True),
        Back(1, 1),
        Unshare(1, 1),
        Bulk(1),
    ]


def mutated(rng: random.Random, payload: bytes) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at:]
                data += b"\0"
            case 2:
                data.insert(at, rng.randrange(256))
    return bytes(data)


@pytest.mark.parametrize("seed", range(5))
async def test_nonsense_ends_the_link_at_most(node: Node, seed: int) -> None:
    rng = random.Random(seed)
    ref = await start(node, Counter())
    payloads = [node.codec.encode(frame) for frame in frames(ref.id)]
    ended = 0
    for i in range(1000):
        link = Link(node, f"peer{i}", "", dialled=False)
        try:
            link.received(memoryview(mutated(rng, rng.choice(payloads))))
        except (BadMessage, LinkLost):
            ended += 1
        link.fail_all(ExitReason(kind="lost"))
        if i % 50 == 0:
            await asyncio.sleep(0)
    assert 100 < ended < 1000
    assert await ref.ask(Add(amount=0)) >= 0
    assert life(ref).mailbox.running == 0
