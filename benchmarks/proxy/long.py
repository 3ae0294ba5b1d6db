"""The last call of a long execution, and many open ones."""

from __future__ import annotations

from math import inf
from pathlib import Path
from time import perf_counter

import msgspec

from benchmarks.proxy.engine import GetFirstTokens
from benchmarks.proxy.load import Drive, DriveEngine
from benchmarks.proxy.stage import Stage
from benchmarks.proxy.words import text
from benchmarks.report import Report
from gyre.trajectory.reader import JournalReader
from gyre.trajectory.rows import encode_call

CALLS, TOKENS = 500, 1_000_000
PARSES, PROPORTIONAL = 3.0, 1.1
EXECUTIONS, RSS_BYTES = 1000, 2**30
EXECUTION_CALLS, CALL_TOKENS = 8, 2000
# Of those who were called last the best: one call may meet whatever else the machine does.
LAST = 5


async def long(report: Report, stage: Stage, answer_tokens: int, calls: int, tokens: int) -> None:
    each = tokens // calls - answer_tokens
    (target,) = await stage.open(1)
    name = f"g000000.{stage.opened - 1:04d}"
    asked = Drive(
        targets=(target,),
        turns=calls,
        stream=False,
        first=[{"role": "user", "content": text(each, 1)}],
        more=text(each, 3),
        tools=[],
        spread_s=0.0,
    )
    through = await stage.load.ask(asked, timeout_s=1200.0)
    await stage.engine.ask(GetFirstTokens())
    direct = await stage.load.ask(
        DriveEngine(
            engine=stage.engine,
            harnesses=1,
            turns=LAST,
            prompt_tokens=tokens,
            max_new_tokens=answer_tokens,
            spread_s=0.0,
        ),
        timeout_s=600.0,
    )
    with JournalReader(stage.journal) as reader:
        records = reader.calls(name)
    messages = [message for record in records for message in (*record.messages, record.output_message)]
    parse_s = parse_seconds(msgspec.json.encode({"messages": messages[:-1]}))
    first, last = records[1], records[-1]
    length = sum(len(record.new_input_ids) + len(record.output_ids) for record in records)
    report.figure("long.tokens", length)
    report.figure("long.parse_s", parse_s)
    report.figure("long.last_call_s", min(through.seconds[-LAST:]))
    report.figure("long.engine_s", min(direct.seconds))
    added = min(through.seconds[-LAST:]) - min(direct.seconds)
    report.at_most("long.last_call_of_parse", added / parse_s, PARSES)
    encoded = len(last.new_input_ids) / len(first.new_input_ids)
    report.at_most("long.last_to_second_encoded", encoded, PROPORTIONAL)
    journalled = len(encode_call(last)) / len(encode_call(first))
    report.at_most("long.last_to_second_journalled", journalled, PROPORTIONAL)


def parse_seconds(body: bytes) -> float:
    best = inf
    for _ in range(10):
        start = perf_counter()
        msgspec.json.decode(body)
        best = min(best, perf_counter() - start)
    return best


async def open_executions(report: Report, stage: Stage, executions: int, answer_tokens: int) -> None:
    """The memory of a proxy with so many, each of some calls."""
    pid = proxy_pid()
    before = rss_bytes(pid)
    targets = await stage.open(executions)
    for start in range(0, executions, 50):
        asked = Drive(
            targets=targets[start : start + 50],
            turns=EXECUTION_CALLS,
            stream=False,
            first=[{"role": "user", "content": text(CALL_TOKENS - answer_tokens, 1)}],
            more=text(CALL_TOKENS - answer_tokens, 3),
            tools=[],
            spread_s=0.0,
        )
        await stage.load.ask(asked, timeout_s=1200.0)
    after = rss_bytes(pid)
    report.figure("memory.execution_tokens", EXECUTION_CALLS * CALL_TOKENS)
    report.figure("memory.an_execution_bytes", (after - before) / executions)
    report.at_most("memory.rss_bytes", after, RSS_BYTES)


def proxy_pid() -> int:
    """Of this process' children the proxy."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if command[-3:] == [b"gyre.actors.child", b"process", b""] and parent(process) == _own():
                return int(process.name)
        except OSError:
            continue
    raise LookupError("no proxy runs")


def parent(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def _own() -> int:
    return int(Path("/proc/self").resolve().name)


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise LookupError(pid)
