import os
import signal
import subprocess
import sys

from gyre.harness import guardian
from gyre.harness.guardian import MARK, kill_marked, marked

PREFIX = "gyre-tests/guardian/"


def start(mark: str, command: str = "echo started; exec sleep 100") -> subprocess.Popen[bytes]:
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
