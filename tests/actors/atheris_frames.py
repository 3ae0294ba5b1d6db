"""Frames found by coverage: what libFuzzer makes of valid ones, into a link of a node that has actors.

    pip install atheris
    python -m tests.actors.atheris_frames -runs=500000

Not a part of the suite: atheris has no wheel for every Python. An input that raises anything but what ends a
connection, or after which the node does not answer, is written to a file and named."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

import atheris
import structlog

with atheris.instrument_imports(include=["gyre.actors"]):
    from gyre.actors import BadMessage, ChildSpec, ExitReason, LinkLost, Node, Supervision
    from gyre.actors.framing import FrameTooLong, Unframer
    from gyre.actors.link import Link
    from gyre.actors.wire import MAX_FRAME_BYTES

from tests.actors.test_million_frames import TARGETS, Target, framed, nonsense, still_works

structlog.configure(processors=[lambda logger, name, event: (_ for _ in ()).throw(structlog.DropEvent)])


class Fuzzed:
    """A node whose links get what the fuzzer has found."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.runs = 0
        self.faults: list[object] = []
        loop.set_exception_handler(lambda _, context: self.faults.append(context))

    async def start(self) -> list[bytes]:
        """Enters the node; valid inputs to begin with."""
        rules = Supervision(max_restarts=10**9, window_s=1.0)
        self.node = await Node(name="fuzzed", supervision=rules).__aenter__()
        targets = [
            await self.node.spawn(ChildSpec(name=f"target-{index}", start=Target)) for index in range(TARGETS)
        ]
        drawn = nonsense(random.Random(0), self.node)
        drawn.targets = [target.id for target in targets]
        return [framed(drawn.well_formed(1)) + framed(drawn.well_formed(2)) for _ in range(300)]

    def one(self, data: bytes) -> None:
        self.loop.run_until_complete(self._one(data))

    async def _one(self, data: bytes) -> None:
        self.runs += 1
        link = Link(self.node, f"peer{self.runs}", "", dialled=False)
        try:
            for payload in Unframer(MAX_FRAME_BYTES).feed(data):
                link.received(payload)
        except (BadMessage, LinkLost, FrameTooLong):
            pass
        link.fail_all(ExitReason(kind="stopped"))
        await asyncio.sleep(0)
        if self.runs % 1000 == 0:
            async with asyncio.timeout(10):
                await still_works(self.node)
        if self.faults:
            raise RuntimeError(self.faults)


def main() -> None:
    fuzzed = Fuzzed(asyncio.new_event_loop())
    seeds = fuzzed.loop.run_until_complete(fuzzed.start())
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds):
            Path(corpus, str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *sys.argv[1:], corpus], fuzzed.one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
