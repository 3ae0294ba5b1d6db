"""A process that writes a journal until it is killed, or until its disk is full and has room again.

python journal_writer.py endless|limit|ballast PATH
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path
from typing import Any

import structlog

from gyre.trajectory.journal import Journal
from gyre.trajectory.reader import JournalReader
from tests.trajectory.trees import record, spec

EXECUTION = "g000000.00"
LIMIT_BYTES = 400_000


async def write_endlessly(path: Path) -> None:
    async with Journal(path) as journal, asyncio.TaskGroup() as tasks:
        await journal.write(spec(EXECUTION))
        for lane in range(8):
            tasks.create_task(_lane(journal, lane))


async def _lane(journal: Journal, lane: int) -> None:
    number = 0
    while True:
        call = f"c{lane}-{number}"
        await journal.write(record(call, execution=EXECUTION, out=[3] * 50))
        print(call, flush=True)
        number += 1


async def fill_the_disk(path: Path, mode: str) -> None:
    events: asyncio.Queue[str] = asyncio.Queue()
    structlog.configure(processors=[lambda _logger, _name, fields: _note(events, fields)])
    ballast = path.with_name("ballast")
    if mode == "limit":
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    else:
        ballast.write_bytes(bytes(500_000))
    async with Journal(path) as journal:
        await journal.write(spec(EXECUTION))
        calls = [f"c{number}" for number in range(80)]
        writes = [asyncio.ensure_future(_write(journal, call)) for call in calls]
        print(await events.get(), flush=True)
        stuck = [write for write in writes if not write.done()]
        await asyncio.wait(stuck, timeout=1.5)
        print("waiting" if not any(write.done() for write in stuck) else "lost", flush=True)
        if mode == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        else:
            ballast.unlink()
        await asyncio.gather(*writes)
        print(await events.get(), flush=True)
        with JournalReader(path) as reader:
            complete = [call.call for call in reader.calls(EXECUTION)] == calls
        print("complete" if complete and events.empty() else "incomplete", flush=True)


async def _write(journal: Journal, call: str) -> None:
    await journal.write(record(call, execution=EXECUTION, out=[3] * 400))


def _note(events: asyncio.Queue[str], fields: Any) -> str:
    events.put_nowait(fields["event"])
    raise structlog.DropEvent


if __name__ == "__main__":
    mode, path = sys.argv[1], Path(sys.argv[2])
    asyncio.run(write_endlessly(path) if mode == "endless" else fill_the_disk(path, mode))
