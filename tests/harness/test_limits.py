"""Hostile commands against the limits of a sandbox with walls: each ends, and the limit is named.

With GYRE_TEST_HOSTILE=1 (`make test-hostile`) all of them are tried, else some."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gyre.harness import usage
from gyre.harness.actor import HarnessActorConfig
from gyre.harness.bridge import FIELDS
from gyre.harness.bubblewrap import Bubblewrap
from gyre.harness.config import EvalConfig, EvaluatorConfig, HarnessConfig, LimitsConfig, TasksConfig
from gyre.harness.output import Output
from gyre.harness.process import Exit
from gyre.harness.sandbox import Confined, run
from tests.harness.neighbours import running

walls = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

Make = Callable[..., Confined]
MB = 1 << 20

HOG = "held = []\nwhile True: held.append(bytearray(8 << 20)); held[-1][::4096] = b'x' * 2048"
FORKED_HOG = (
    "import os, time\nfor _ in range(6): os.fork()\n"
    "held = bytearray(8 << 20); held[::4096] = b'x' * 2048; time.sleep(100)"
)
NO_PROCESS = """
import os, time
file = os.memfd_create("held")
for _ in range(128): os.write(file, b"x" * (1 << 20))
time.sleep(100)
"""
SYSTEM_V = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
at = libc.shmat(libc.shmget(0, 128 << 20, 0o1600), None, 0)
ctypes.memset(at, 1, 128 << 20)
libc.shmdt(ctypes.c_void_p(at))
time.sleep(100)
"""
# What other processes may not look into: after a request that is refused without a word, and in truth.
NOT_DUMPABLE = "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"
EXECUTE_ONLY = """
import os, shutil
shutil.copy("/bin/sleep", "sleep")
os.chmod("sleep", 0o111)
{hold}
for fd in held: os.set_inheritable(fd, True)
os.execv("sleep", ["sleep", "100"])
"""
# A first thread that ended has neither files nor memory any more, the others have.
NO_LEADER = """
import ctypes, threading, time
def rest():
    time.sleep(0.1)
    {hold}
    time.sleep(100)
threading.Thread(target=rest).start()
ctypes.CDLL(None).pthread_exit(None)
"""
MANY_FILES = """
import os, time
for n in range(40):
    with open(f"/{('workspace', 'tmp', 'home/agent')[n % 3]}/{n}", "wb") as f: f.write(b"x" * (1 << 20))
time.sleep(100)
"""
NO_NAME = """
import os, time
held = []
for n in range(40):
    held.append(open("file", "wb"))
    held[-1].write(b"x" * (1 << 20))
    held[-1].flush()
    os.unlink("file")
time.sleep(100)
"""
HIDDEN = """
import os, time
os.makedirs("a/b")
for n in range(24): open(f"a/b/{n}", "wb").write(b"x" * (1 << 20))
os.chmod("a/b", 0o400)
os.chmod("a", 0)
time.sleep(100)
"""
# Deeper than a path can be long.
DEEP = """
import os, time
for _ in range(20):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
for n in range(40): open(str(n), "wb").write(b"x" * (1 << 20))
time.sleep(100)
"""
# The first process watches: it is to be stopped, ended, or held.
FIRST = """
import ctypes, os, resource, signal
for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT):
    os.kill(1, number)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(16, 1, 0, 0) == -1 and ctypes.get_errno() == 1
try: open("/proc/1/mem", "r+b")
except PermissionError: pass
else: raise SystemExit("its memory can be written to")
# Its limits and its turns, by each way to name it, are not to be changed; one's own are.
files, sched = resource.RLIMIT_NOFILE, os.sched_param(0)
ioprio = 30 if os.uname().machine == "aarch64" else 251
def own_first(call): return (lambda: call(0), lambda: call(os.getpid()), lambda: call(1))
for own, by_number, first in (
    own_first(lambda pid: resource.prlimit(pid, files, (30, 30))),
    own_first(lambda pid: resource.prlimit(pid, files)),
    own_first(lambda pid: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0))),
    own_first(lambda pid: os.sched_setscheduler(pid, os.SCHED_BATCH, sched)),
    own_first(lambda pid: os.sched_setparam(pid, sched)),
    own_first(lambda pid: os.sched_setaffinity(pid, os.sched_getaffinity(0))),
    (lambda: None, lambda: None, lambda: os.setpriority(os.PRIO_PGRP, 1, 19)),
    (lambda: None, lambda: None, lambda: os.setpriority(os.PRIO_USER, 0, 19)),
):
    own(), by_number()
    try: first()
    except PermissionError: pass
    else: raise SystemExit("its limits and turns can be changed")
for which, who in ((1, 1), (2, 1), (3, 1000)):
    assert libc.syscall(ioprio, which, who, 3 << 13) == -1 and ctypes.get_errno() == 1
assert libc.syscall(ioprio, 1, 0, 3 << 13) == 0
"""
BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"

MEMORY_FILE = "held = [os.memfd_create('held')]; [os.write(held[0], b'x' * (1 << 20)) for _ in range(128)]"
HOGS = {
    "one": HOG,
    "many": FORKED_HOG,
    "memfd": NO_PROCESS,
    "sysv": SYSTEM_V,
    "not-dumpable": NOT_DUMPABLE + NO_PROCESS,
    "execute-only": EXECUTE_ONLY.format(hold=MEMORY_FILE),
    "no-leader": NO_LEADER.format(hold="held = b'x' * (128 << 20)"),
    "no-leader-memfd": NO_LEADER.format(hold=f"import os; {MEMORY_FILE}"),
}
FILLERS = {
    "many": MANY_FILES,
    "no-name": NO_NAME,
    "hidden": HIDDEN,
    "not-dumpable": NOT_DUMPABLE + NO_NAME,
    "deep": DEEP,
}
if not os.environ.get("GYRE_TEST_HOSTILE"):
    del HOGS["many"], HOGS["sysv"], FILLERS["many"]


@pytest.fixture
def bubblewrap(tmp_path: Path) -> Bubblewrap:
    made = Bubblewrap(tmp_path / "sandbox")
    made.check()
    return made


async def ended(bubblewrap: Bubblewrap, confined: Confined) -> Exit:
    output = Output()
    exit_ = await run(bubblewrap, confined, output, timeout_s=50.0)
    assert exit_.kind == "exited", (exit_, output.tail())
    return exit_


def over(name: str, value: int) -> Exit:
    detail = f"all of it was killed: more than harness.limits.{name} = {value}"
    return Exit(kind="exited", code=137, detail=detail)


@walls
@pytest.mark.parametrize("code", HOGS.values(), ids=HOGS)
async def test_a_memory_hog_is_killed(bubblewrap: Bubblewrap, confined: Make, code: str) -> None:
    command = confined(sys.executable, "-c", code, file_bytes=1 << 30, memory_bytes=80 * MB)
    assert await ended(bubblewrap, command) == over("memory_bytes", 80 * MB)


@walls
@pytest.mark.parametrize("code", FILLERS.values(), ids=FILLERS)
async def test_who_fills_the_disk_is_killed(bubblewrap: Bubblewrap, confined: Make, code: str) -> None:
    command = confined(sys.executable, "-c", code, disk_bytes=20 * MB)
    assert await ended(bubblewrap, command) == over("disk_bytes", 20 * MB)


@walls
async def test_a_huge_file_cannot_be_written(bubblewrap: Bubblewrap, confined: Make, tmp_path: Path) -> None:
    code = "import os\nfile = open('/tmp/huge', 'wb')\nos.ftruncate(file.fileno(), 1 << 40)"
    assert (await ended(bubblewrap, confined(sys.executable, "-c", code))).code == 1
    assert (tmp_path / "tmp" / "huge").stat().st_size == 0


@walls
async def test_too_many_processes_are_killed(bubblewrap: Bubblewrap, confined: Make) -> None:
    command = confined(sys.executable, "-c", BOMB, processes=50)
    assert await ended(bubblewrap, command) == over("processes", 50)


@walls
async def test_the_watch_cannot_be_put_to_sleep(bubblewrap: Bubblewrap, confined: Make) -> None:
    command = confined(sys.executable, "-c", FIRST + BOMB, processes=50)
    assert await ended(bubblewrap, command) == over("processes", 50)


@walls
async def test_a_folder_may_have_any_name(bubblewrap: Bubblewrap, confined: Make) -> None:
    command = confined(sys.executable, "-c", "import time; open('file', 'w').close(); time.sleep(0.2)")
    workspace = msgspec.structs.replace(command.workspace, inside="/work:space")
    command = msgspec.structs.replace(command, workspace=workspace)
    assert await ended(bubblewrap, command) == Exit(kind="exited", code=0)


@walls
async def test_what_is_within_the_limits_runs(bubblewrap: Bubblewrap, confined: Make) -> None:
    """Shared memory counts once, a file with many names too. Who wants to be hidden may, and is not."""
    code = (
        "import ctypes, os, time\nprctl = ctypes.CDLL(None).prctl\n"
        "assert (prctl(4, 0, 0, 0, 0), prctl(3, 0, 0, 0, 0)) == (0, 1)\nheld = b'x' * (64 << 20)\n"
        "children = [os.fork() for _ in range(1)]\nif 0 in children: time.sleep(0.7); os._exit(0)\n"
        "open('file', 'wb').write(b'x' * (1 << 20))\nfor n in range(60): os.link('file', str(n))\n"
        "time.sleep(0.7)\nos.wait()"
    )
    command = confined(sys.executable, "-c", code, memory_bytes=110 * MB, disk_bytes=20 * MB)
    assert await ended(bubblewrap, command) == Exit(kind="exited", code=0)


@walls
async def test_memory_disks_are_small(bubblewrap: Bubblewrap, confined: Make) -> None:
    code = "import os\ns = os.statvfs('/dev/shm')\nprint(s.f_blocks * s.f_frsize, os.access('/dev', os.W_OK))"
    output = Output()
    await run(bubblewrap, confined(sys.executable, "-c", code), output, timeout_s=50.0)
    assert output.tail() == f"{64 * MB} False\n"


@walls
async def test_an_execution_says_which_limit_it_exceeded(tmp_path: Path) -> None:
    """What it left is scored."""
    (tmp_path / "tasks" / "a").mkdir(parents=True)
    (tmp_path / "tasks" / "a" / "prompt.md").write_text("use less")
    config = HarnessActorConfig(
        harness=HarnessConfig(
            command=("{python}", "-c", f"open('left', 'w').close()\n{HOG}"),
            limits=LimitsConfig(memory_bytes=80 * MB),
            refills=0,
        ),
        tasks=TasksConfig(path=tmp_path / "tasks"),
        evaluator=EvaluatorConfig(
            command=("{python}", "-c", "import os; print(os.path.exists('left') / 4)"), sandbox="process"
        ),
        eval=EvalConfig(),
        group_size=1,
        run_dir=tmp_path / "run",
    )
    async with running(config) as job:
        await job.dispatch()
        (result,) = await job.results(1)
    assert (result.reason, result.exit_code, result.score) == ("harness_error", 137, 0.25)
    assert result.detail == over("memory_bytes", 80 * MB).detail


@pytest.fixture
def folders_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the processes of the host, which are anybody's."""
    monkeypatch.setattr(usage.Look, "_open_files", lambda self, process: iter(()))


@pytest.mark.usefixtures("folders_alone")
def test_usage_of_a_tree(tmp_path: Path) -> None:
    for n in range(usage.SLICE + 1):
        (tmp_path / str(n)).mkdir()
    (tmp_path / "7" / "file").write_bytes(b"x" * 100_000)
    os.link(tmp_path / "7" / "file", tmp_path / "link")
    os.symlink("/", tmp_path / "out")
    look = usage.Look([str(tmp_path)], set())
    assert list(look.parts()) == [None]
    own = sum(os.lstat(tmp_path / str(n)).st_blocks * 512 for n in range(usage.SLICE + 1))
    file = (tmp_path / "link").stat().st_blocks * 512
    assert own + file <= look.disk_bytes <= own + file + 4096


@pytest.mark.usefixtures("folders_alone")
def test_a_look_follows_soon_also_where_one_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(usage.time, "monotonic", lambda: now_s)
    watch = usage.Watch({name: 1 << 60 for name in FIELDS}, [str(tmp_path)])
    monkeypatch.setattr(usage, "SLICE", 1)
    for n in range(3):
        (tmp_path / str(n)).touch()
    watch.look()
    while watch.is_looking:
        now_s += 100.0
        watch.look()
        watch._look_took_s += 100.0
    watch.look()
    assert not watch.is_looking
    now_s += usage.PAUSE_S
    watch.look()
    assert watch.is_looking


@pytest.mark.usefixtures("folders_alone")
def test_a_path_may_be_longer_than_the_kernel_takes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "PART_CHARS", 8)
    below = tmp_path.joinpath(*["four"] * 9)
    below.mkdir(parents=True)
    (below / "file").write_bytes(b"x" * 100_000)
    look = usage.Look([str(tmp_path)], set())
    list(look.parts())
    own = sum(entry.stat().st_blocks * 512 for entry in tmp_path.rglob("*"))
    assert (look.disk_bytes, look.unseen) == (own, "")
    monkeypatch.setattr(usage, "PARTS", 3)
    list(look.parts())
    assert look.unseen == "disk_bytes"


@pytest.mark.usefixtures("folders_alone")
def test_who_cannot_be_looked_into_at_some_looks_in_succession_is_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(usage, "SHARE", 1e9)
    (tmp_path / "a").mkdir()
    most = {name: 1 << 60 for name in FIELDS}
    watch = usage.Watch(most, [str(tmp_path)])

    def look(parts: int) -> str | None:
        monkeypatch.setattr(usage, "PARTS", parts)
        watch.look()
        while watch.is_looking:
            watch.look()
        return watch.exceeded()

    once = [look(0) for _ in range(usage.UNSEEN_LOOKS - 1)]
    assert [*once, look(9), *once] == [None] * (2 * len(once) + 1)
    assert [look(0) for _ in range(usage.UNSEEN_LOOKS)][-1] == f"disk_bytes = {1 << 60}"


def test_a_process_that_is_gone_has_no_memory() -> None:
    assert usage.resident("0") == usage.proportional("0") == 0
    assert 0 < usage.proportional("self") <= usage.resident("self")
