"""Work that goes on where whoever began it has gone."""

from __future__ import annotations

import asyncio
from typing import Any


def unheard(work: asyncio.Future[Any]) -> None:
    """A callback for its end: what it raised has been told already, or concerns nobody any more."""
    if not work.cancelled():
        work.exception()
