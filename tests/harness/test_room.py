from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import structlog.testing

from gyre.harness import room


def failing(*errors: int) -> tuple[list[int], Callable[[], None]]:
    """Work that fails so often, with these errors."""
    left, tries = list(errors), []

    def work() -> None:
        tries.append(len(left))
        if left:
            raise OSError(left.pop(0), "cannot write")

    return tries, work


async def test_a_full_disk_is_waited_for_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RETRY_S", 0.001)
    tries, work = failing(errno.ENOSPC, errno.EDQUOT, errno.ENOSPC)
    with structlog.testing.capture_logs() as events:
        await room.with_room(work, "g000000.00")
    assert len(tries) == 4
    assert [(e["event"], e["execution"]) for e in events] == [("execution_waits_for_room", "g000000.00")]


async def test_other_faults_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RETRY_S", 0.001)
    tries, work = failing(errno.ENOSPC, errno.EACCES)
    with pytest.raises(PermissionError):
        await room.with_room(work, "g000000.00")
    assert len(tries) == 2
