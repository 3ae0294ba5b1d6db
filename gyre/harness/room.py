"""Work that needs room on the disk. That a disk is full is no fault of an execution: it waits."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import structlog

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
RETRY_S = 1.0

log = structlog.get_logger()


async def with_room(work: Callable[[], None], execution: str) -> None:
    """Does blocking `work` in a thread, again while the disk is full; `work` begins anew each time and gives
    back what it took. Raises what else it raises."""
    waits = False
    while True:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not waits:
                waits = True
                log.warning("execution_waits_for_room", execution=execution, reason=str(error))
        # The disk tells nobody when there is room again.
        await asyncio.sleep(RETRY_S)
