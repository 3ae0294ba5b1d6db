"""Alone in a namespace of pids, the first of all: what its fork server has forked ends after the server and
is reaped, and before this process hears of it another has the number. Says how both end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from gyre.actors import ActorDied, ChildSpec, Node, ProcessSpec, run
from gyre.actors.forking.keeper import ForkServer
from tests.actors.zoo import CounterConfig, Hang, Pid

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


def kill_and_replace(server: int, pid: int) -> subprocess.Popen[bytes]:
    """While no loop runs. The server, and then another process with the number of what it has forked."""
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # orphans are the first process'
    LAST_PID.write_text(str(pid - 1))
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert other.pid == pid
    return other


async def main() -> None:
    async with Node(name="root") as node:
        server = ForkServer(("tests.actors.zoo",), {})
        await node.spawn(ChildSpec(name="fork-server", start=lambda: server))
        config = CounterConfig()
        spec = ProcessSpec(
            name="a", actor="tests.actors.zoo:Counter", config=config, fork=True, restart="temporary"
        )
        forked = await node.spawn(spec)
        pid = await forked.ask(Pid())
        assert server._process is not None
        other = kill_and_replace(server._process.pid, pid)
        try:
            await forked.ask(Hang())
        except ActorDied as error:
            print(error.reason.signal)
    other.terminate()
    print(signal.Signals(-other.wait()).name)


run(main())
