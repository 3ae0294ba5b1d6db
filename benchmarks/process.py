"""Processes of a benchmark."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
LINE_BYTES = 2**24


def quiet() -> None:
    """Only what goes wrong is logged, and not where the figures are printed."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class Companion:
    """A process of our own that answers each line with a line of JSON; it ends with its standard input."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self._module = module
        self._process = process
        self.hello: dict[str, Any] = {}

    async def ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        return await self.heard()

    async def heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with exit code {await self._process.wait()}")
        return msgspec.json.decode(line, type=dict[str, Any])


@asynccontextmanager
async def companion(module: str, *arguments: str, python: str = sys.executable) -> AsyncIterator[Companion]:
    """`python -m module arguments`, its first line heard as `hello`."""
    process = await asyncio.create_subprocess_exec(
        python,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )
    it = Companion(module, process)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            it.hello = await it.heard()
        yield it
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
