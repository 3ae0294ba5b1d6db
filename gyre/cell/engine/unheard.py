"""Work that goes on where whoever began it has gone."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

R = TypeVar("R")


def unheard(work: asyncio.Future[Any]) -> None:
    """A callback for its end: what it raised has been told already, or concerns nobody any more."""
    if not work.cancelled():
        work.exception()


async def wholly(work: asyncio.Future[R]) -> R:
    """What it brings. Cancelled, this returns when the work is over: it is at memory of others."""
    work.add_done_callback(unheard)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
