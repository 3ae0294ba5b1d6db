"""What a call takes longer through a proxy than at the engine, and its first byte than the first token: ours,
and a peer before an engine that speaks HTTP."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import anyio
import msgspec
import numpy as np

from benchmarks.process import companion
from benchmarks.proxy.engine import GetFirstTokens, Pace
from benchmarks.proxy.load import Calls, Drive, DriveEngine, Target
from benchmarks.proxy.stage import Stage
from benchmarks.proxy.words import text, tool
from benchmarks.report import Report

ADDED_P50_S, ADDED_P99_S, FIRST_BYTE_S = 0.002, 0.010, 0.002
FIRST_TOKENS, MORE_TOKENS, TOOLS = 2000, 300, 8
PEER = "rllm-model-gateway"


def drive(targets: Sequence[Target], turns: int, stream: bool, spread_s: float) -> Drive:
    first = [
        {"role": "system", "content": text(FIRST_TOKENS // 2, 1)},
        {"role": "user", "content": text(FIRST_TOKENS // 2, 2)},
    ]
    return Drive(
        targets=tuple(targets),
        turns=turns,
        stream=stream,
        first=first,
        more=text(MORE_TOKENS, 3),
        tools=[tool(number) for number in range(TOOLS)],
        spread_s=spread_s,
    )


class Added:
    """Of calls, over what they take without anybody between."""

    def __init__(self, calls: Calls, direct: Calls) -> None:
        self.p50_s = percentile(calls.seconds, 50) - percentile(direct.seconds, 50)
        self.p99_s = percentile(calls.seconds, 99) - percentile(direct.seconds, 99)


async def ours(report: Report, stage: Stage, pace: Pace, harnesses: int, turns: int) -> Added:
    """In turn at the engine and through the proxy."""
    prompt = FIRST_TOKENS + MORE_TOKENS * turns // 2
    direct = await stage.load.ask(
        DriveEngine(
            engine=stage.engine,
            harnesses=harnesses,
            turns=turns,
            prompt_tokens=prompt,
            max_new_tokens=pace.tokens,
            spread_s=pace.seconds,
        ),
        timeout_s=600.0,
    )
    await stage.engine.ask(GetFirstTokens())
    found: dict[bool, Calls] = {}
    for stream in (False, True):
        asked = drive(await stage.open(harnesses), turns, stream, pace.seconds)
        found[stream] = await stage.load.ask(asked, timeout_s=600.0)
        first_tokens = await stage.engine.ask(GetFirstTokens())
    late = [at - first_tokens[call] for call, at in found[True].first_bytes.items()]
    added = Added(found[False], direct)
    streamed = Added(found[True], direct)
    report.figure("calls.engine_p50_s", percentile(direct.seconds, 50))
    report.figure("calls.engine_p99_s", percentile(direct.seconds, 99))
    report.figure("calls.streamed_added_p50_s", streamed.p50_s)
    report.figure("calls.streamed_added_p99_s", streamed.p99_s)
    report.figure("calls.first_byte_p99_s", percentile(late, 99))
    report.at_most("calls.added_p50_s", added.p50_s, ADDED_P50_S)
    report.at_most("calls.added_p99_s", added.p99_s, ADDED_P99_S)
    report.at_most("calls.first_byte_p50_s", percentile(late, 50), FIRST_BYTE_S)
    return streamed


async def peer(
    report: Report, stage: Stage, pace: Pace, harnesses: int, turns: int, python: Path, folder: Path
) -> Added:
    """A gateway that records what it forwards; the engine behind it speaks HTTP."""
    word = " word"
    arguments = [msgspec.json.encode(pace).decode(), word]
    async with companion("benchmarks.proxy.engine", *arguments) as engine:
        port = engine.hello["port"]
        async with _gateway(python, folder, port) as gateway_port:
            through = [_target(gateway_port, f"/sessions/s{at}/v1") for at in range(harnesses)]
            asked = drive([_target(port, "/v1")] * harnesses, turns, True, pace.seconds)
            direct = await stage.load.ask(asked, timeout_s=600.0)
            asked = drive(through, turns, True, pace.seconds)
            calls = await stage.load.ask(asked, timeout_s=600.0)
    added = Added(calls, direct)
    report.figure(f"peer.{PEER}.streamed_added_p50_s", added.p50_s)
    report.figure(f"peer.{PEER}.streamed_added_p99_s", added.p99_s)
    report.figure(f"peer.{PEER}.first_byte_p50_s", percentile(calls.first_byte_s, 50))
    report.figure(f"peer.{PEER}.first_byte_p99_s", percentile(calls.first_byte_s, 99))
    return added


def percentile(values: Sequence[float], of: float) -> float:
    return float(np.percentile(np.asarray(values), of))


def _target(port: int, prefix: str) -> Target:
    return Target(host="127.0.0.1", port=port, path=f"{prefix}/chat/completions", key="none")


@asynccontextmanager
async def _gateway(python: Path, folder: Path, engine_port: int) -> AsyncIterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    worker = f"http://127.0.0.1:{engine_port}/v1"
    options: dict[str, Any] = {"--port": port, "--worker": worker, "--db-path": folder / "peer.db"}
    flags = [str(part) for pair in options.items() for part in pair]
    command = [str(python), "-m", "rllm_model_gateway", "--store", "sqlite", "--log-level", "ERROR", *flags]
    async with await anyio.open_process(command, stdout=DEVNULL, stderr=DEVNULL) as process:
        try:
            with anyio.fail_after(60):
                await _until_it_listens(port)
            yield port
        finally:
            process.terminate()


async def _until_it_listens(port: int) -> None:
    while True:
        try:
            async with await anyio.connect_tcp("127.0.0.1", port):
                return
        except OSError:
            await anyio.sleep(0.1)
