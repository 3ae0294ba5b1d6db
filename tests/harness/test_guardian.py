import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from gyre.harness import guardian
from gyre.harness.guardian import MARK, kill_marked, marked
from tests.harness.conftest import MARK as TESTS

PREFIX = f"{TESTS}guardian/"


def start(mark: str, command: str = "echo started; kill -STOP $$") -> subprocess.Popen[bytes]:
    """Without an exec after it has started: in the midst of one a process has no environment to be seen."""
    process = subprocess.Popen(
        ["sh", "-c", command], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.stdout.close()
    return process


def test_marks_are_found_by_their_beginning() -> None:
    one, ten = start(f"{PREFIX}1/"), start(f"{PREFIX}10/")
    try:
        assert set(marked(PREFIX)) == {one.pid, ten.pid}
        assert marked(f"{PREFIX}1/") == [one.pid]
        assert kill_marked(f"{PREFIX}1/") == 1
        assert one.wait() == -signal.SIGKILL
        assert ten.poll() is None
    finally:
        kill_marked(PREFIX)
        ten.wait()


def test_children_in_sessions_of_their_own_are_killed() -> None:
    process = start(PREFIX, "setsid sh -c 'setsid sleep 100 & echo started; sleep 100'; sleep 100")
    assert kill_marked(PREFIX) >= 3
    process.wait()
    assert not marked(PREFIX)


def test_a_process_that_execs_all_the_time_is_found() -> None:
    """In the midst of an exec it has no environment to be seen."""
    process = start(PREFIX, 'echo started; export AGAIN=\'exec sh -c "$AGAIN"\'; eval "$AGAIN"')
    try:
        assert all(marked(PREFIX) == [process.pid] for _ in range(100))
    finally:
        process.kill()
        process.wait()


def test_a_process_that_forks_all_the_time_is_killed() -> None:
    process = start(PREFIX, "echo started; while true; do sleep 0.001 & done")
    kill_marked(PREFIX)
    process.wait()
    assert not marked(PREFIX)


def test_when_the_job_is_gone_the_guardian_kills_what_is_marked() -> None:
    harness = start(f"{PREFIX}x/")
    watcher = subprocess.Popen([sys.executable, "-I", "-S", guardian.__file__, PREFIX], stdin=subprocess.PIPE)
    watcher.communicate()
    assert harness.wait() == -signal.SIGKILL
    assert watcher.returncode == 0


JOB = """
import asyncio, os, sys
from pathlib import Path
from gyre.harness.output import Output
from gyre.harness.process import start_guardian
from gyre.harness.sandbox import Confined, Limits, Mount, ProcessSandbox, run

async def main(folder, mark):
    guardian = start_guardian(mark)
    code = "setsid sh -c 'echo up > fifo; sleep 100' & sleep 100"
    confined = Confined(
        command=("sh", "-c", code), environment=dict(os.environ), mounts=(), socket=None,
        limits=Limits(file_bytes=1 << 20),
        workspace=Mount(host=folder, inside="/workspace"), mark=f"{mark}g000000.00/1/",
    )
    await run(ProcessSandbox(), confined, Output(), timeout_s=100)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


def test_kill_9_of_the_job_leaves_no_harness(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    root = Path(__file__).parents[2]
    job = subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path), f"{TESTS}job/"], cwd=root)
    assert select.select([fifo], [], [], 30)[0], "the job did not start"
    os.close(fifo)
    processes = [os.pidfd_open(pid) for pid in marked(f"{TESTS}job/")]
    assert len(processes) >= 3
    job.kill()
    job.wait()
    for process in processes:
        assert select.select([process], [], [], 20)[0], "a process of the harness still runs"
        os.close(process)
