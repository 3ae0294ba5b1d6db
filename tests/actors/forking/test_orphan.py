"""A fork without its server: by what it ends, and how that is known."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from gyre.actors.forking.orphan import ended_with
from tests.actors.forking.conftest import ENDS_ARE_KNOWN
from tests.actors.test_process import gone

LEADER = """
import os, subprocess, sys, time
from gyre.actors.forking.server import die_with_the_other_end_of

die_with_the_other_end_of(int(sys.argv[1]))
other = subprocess.Popen(["sleep", "600"])
print(other.pid, flush=True)
while True:  # without a loop that could hear of it
    pass
"""


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("exit 0", 0)])
def test_how_it_ended_is_known_before_and_after_it_is_reaped(end: str, code: int) -> None:
    process = subprocess.Popen(["sh", "-c", end])
    pidfd = os.pidfd_open(process.pid)
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended_with(process.pid, pidfd) == code
        process.wait()
        assert ended_with(process.pid, pidfd) == (code if ENDS_ARE_KNOWN else None)
    finally:
        os.close(pidfd)


def test_its_group_ends_when_the_other_end_is_closed() -> None:
    its_end, ours = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", LEADER, str(its_end)],
        stdout=subprocess.PIPE,
        pass_fds=[its_end],
        start_new_session=True,
    ) as leader:
        os.close(its_end)
        assert leader.stdout is not None
        other = int(leader.stdout.readline())
        os.close(ours)
        assert leader.wait() == -9
        assert asyncio.run(gone(other))


def test_it_does_not_begin_where_the_other_end_is_closed_already() -> None:
    its_end, ours = os.pipe()
    os.close(ours)
    leader = subprocess.run(
        [sys.executable, "-c", LEADER, str(its_end)],
        stdout=subprocess.PIPE,
        pass_fds=[its_end],
        process_group=0,
    )
    os.close(its_end)
    assert (leader.returncode, leader.stdout) == (1, b"")
