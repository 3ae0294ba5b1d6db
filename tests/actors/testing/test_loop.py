from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from gyre.actors.testing import Host, SimLoop, Stuck

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], seed: int = 0) -> tuple[T, SimLoop]:
    loop = SimLoop(random.Random(seed))
    try:
        return loop.run_until_complete(main), loop
    finally:
        loop.close()


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    now, loop = run(main())
    assert now == 3600.0
    assert loop.steps < 10


def test_timers_fire_in_order_of_time_then_of_setting() -> None:
    async def main() -> list[str]:
        loop, fired = asyncio.get_running_loop(), list[str]()
        loop.call_later(2.0, fired.append, "late")
        loop.call_later(1.0, fired.append, "first")
        loop.call_later(1.0, fired.append, "second")
        loop.call_later(1.5, fired.append, "never").cancel()
        await asyncio.sleep(3.0)
        return fired

    assert run(main())[0] == ["first", "second", "late"]


def test_a_timeout_is_virtual() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main())[0] == 50.0


def test_waiting_for_what_never_comes_is_an_error_that_names_who_waits() -> None:
    async def main() -> None:
        asyncio.current_task().set_name("the one that waits")  # type: ignore[union-attr]
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="the one that waits"):
        run(main())


def test_one_host_keeps_its_order_and_seeds_mix_hosts() -> None:
    async def main() -> str:
        loop, order = asyncio.get_running_loop(), list[str]()
        for name in "ab":
            host = Host(name)
            for number in range(5):
                loop.call_soon(order.append, f"{name}{number}", context=host.context)
        await asyncio.sleep(1.0)
        return " ".join(order)

    orders = {run(main(), seed)[0] for seed in range(10)}
    assert len(orders) > 5
    for order in orders:
        for name in "ab":
            assert [word for word in order.split() if word[0] == name] == [f"{name}{n}" for n in range(5)]


def test_nothing_of_a_dead_host_runs() -> None:
    ran: list[str] = []

    async def victim() -> None:
        try:
            await asyncio.sleep(1.0)
            ran.append("went on")
        finally:
            ran.append("finally")

    async def main() -> None:
        loop, host = asyncio.get_running_loop(), Host("a")
        task = loop.create_task(victim(), context=host.context.copy())
        await asyncio.sleep(0.5)
        host.alive = False
        loop.call_soon(ran.append, "called", context=host.context)
        task.cancel()
        await asyncio.sleep(5.0)
        assert ran == []
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    run(main())


def test_the_trace_is_the_same_for_the_same_seed_only() -> None:
    async def main() -> None:
        hosts = [Host("a"), Host("b")]
        loop = asyncio.get_running_loop()
        tasks = {
            loop.create_task(asyncio.sleep(0.1 * index), context=host.context.copy())
            for host in hosts
            for index in range(5)
        }
        await asyncio.wait(tasks)

    traces = [run(main(), seed)[1].trace for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]
