"""The life of a server of our own: why it does not start, what a kill costs, what stays of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gyre.cell.engine import Chunk, EngineFault, SamplingParams
from gyre.cell.engine.sglang_server import SglangServer
from tests.cell.engine.calls import chunks_of, generate, joined, prompt, request, until
from tests.run.jobs import children
from tests.sglang.conftest import Pool, SglangCase, sglang_config

MakeCase = Callable[..., SglangCase]

LONG = SamplingParams(temperature=1.0, max_new_tokens=200)


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


def keepers() -> set[int]:
    """Of servers that this process has started."""
    return {
        pid for pid in children(os.getpid()) if b"sglang_keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_one_that_cannot_start_says_why_and_leaves_nothing(make_case: MakeCase, tmp_path: Path) -> None:
    case = make_case("llama")
    served = msgspec.structs.replace(case.served(), model_folder=tmp_path / "nowhere")
    server = SglangServer(served, sglang_config(), tmp_path / "server.log")
    with pytest.raises(EngineFault, match="nowhere"):
        await server.start()
    assert alive([server.pid]) == []


async def test_a_server_killed_among_32_streams(make_case: MakeCase) -> None:
    """Each call is answered, the engine says that it is lost, nothing is left; another takes its place."""
    case = make_case("llama", own=True)
    others = keepers()
    engine = await case.awake()
    watching = asyncio.create_task(engine.watch())
    calls = [
        asyncio.create_task(chunks_of(engine, request(prompt(9, i), LONG, call=f"c{i}"))) for i in range(32)
    ]
    await until(engine, lambda metrics: metrics.generated_tokens >= 64)
    (keeper,) = keepers() - others
    (server,) = children(keeper)
    left = [keeper, *descendants(keeper)]
    assert len(left) >= 3
    os.kill(server, signal.SIGKILL)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    faults = [answer for answer in answers if isinstance(answer, EngineFault)]
    assert len(faults) == 32
    assert all("server ended with code 137" in str(fault) for fault in faults)
    with pytest.raises(EngineFault, match="server ended with code 137"):
        await watching
    assert alive(left) == []
    with pytest.raises(EngineFault):
        await generate(engine, prompt(5))
    await engine.close()

    again = await case.awake()
    assert joined(await chunks_of(again, request(prompt(9), LONG))).finish_reason == "length"
    (keeper,) = keepers() - others
    left = [keeper, *descendants(keeper)]
    await again.close()
    assert alive(left) == []


async def test_fifty_cycles_leave_all_as_it_was(make_case: MakeCase, pool: Pool, shm: Path) -> None:
    case = make_case("llama")
    engine = await case.awake()
    used: list[dict[str, int]] = []
    for cycle in range(50):
        await generate(engine, prompt(20, cycle))
        call = asyncio.create_task(chunks_of(engine, request(prompt(9), LONG, call="live")))
        await until(engine, lambda metrics, call=call: metrics.running > 0 or call.done())
        await engine.update(case.weights(1, version=2 * cycle + 1))
        await engine.sleep()
        chunk: Chunk = joined(await call)
        assert chunk.finish_reason == "abort"
        await engine.wake(case.weights(0, version=2 * cycle + 2))
        if cycle in (9, 49):
            used.append(_used([os.getpid(), *descendants(pool.keeper(case.served()))]))
    print(f"after 10 and 50 cycles: {used}")
    assert used[1]["fds"] <= used[0]["fds"] + 2
    assert used[1]["threads"] <= used[0]["threads"] + 2
    assert used[1]["ports"] <= used[0]["ports"] + 2
    assert used[1]["rss_mb"] <= used[0]["rss_mb"] * 1.05
    assert list((shm / "sglang").iterdir()) == []


def _used(pids: list[int]) -> dict[str, int]:
    """Of all these processes."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]

    def total(field: str) -> int:
        return sum(int(s.split(f"{field}:")[1].split()[0]) for s in statuses)

    links = [os.readlink(fd) for pid in pids for fd in _fds(pid)]
    return {
        "fds": len(links),
        "ports": sum(link.startswith("socket:") for link in links),
        "threads": total("Threads"),
        "rss_mb": total("VmRSS") // 1024,
    }


def _fds(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(folder):
        if os.path.lexists(f"{folder}/{name}"):
            found.append(f"{folder}/{name}")
    return found
