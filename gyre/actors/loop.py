"""How a program with actors is run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], *, debug: bool = False) -> T:
    """`asyncio.run` on uvloop."""
    import uvloop  # 20 ms that a reader of messages need not pay

    with asyncio.Runner(debug=debug, loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
