"""Jobs as a user starts them: real processes, their events, what they leave."""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors import safe_open

from gyre.actors.forking.messages import FORK_SERVER
from gyre.trajectory.reader import JournalReader

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.toml"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# A step of 16 executions, checkpoints of all steps.
SMALL = ("train.groups_per_step=2", "train.group_size=8", "eval.count=24", "checkpoint.keep=100")

Event = dict[str, Any]


class RunningJob:
    """`python -m gyre.run`. `events` grows as the job writes them; `wait_for` reads on where it stopped."""

    def __init__(
        self,
        run_dir: Path,
        overrides: Sequence[str],
        *,
        resume: bool = False,
        job: Path = QUICKSTART,
        forks: bool = False,
    ) -> None:
        self.run_dir = run_dir
        self.events: list[Event] = []
        self._next = 0
        self._partial = b""
        self._lines: list[str] = []
        self._output = ""
        self._written = threading.Condition(threading.RLock())
        log = run_dir / "events.jsonl"
        self._offset = log.stat().st_size if resume else 0
        command = [sys.executable, "-m", "gyre.run", str(job), "--set", f"run_dir={run_dir}"]
        command += [part for override in overrides for part in ("--set", override)]
        self.process = subprocess.Popen(
            command + ["--resume"] * resume,
            cwd=ROOT,
            env=environment(run_dir, forks),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_lines, daemon=True)
        self._reader.start()

    # --- events -------------------------------------------------------------------------------------

    def wait_for(self, name: str, timeout_s: float = 90.0, **fields: Any) -> Event:
        """The next event of that name with these fields, after the one that was waited for before."""
        found: list[Event] = []

        def next_one() -> bool:
            while not found and self._next < len(self.events):
                event = self.events[self._next]
                self._next += 1
                found.extend([event] if event["event"] == name and fields.items() <= event.items() else [])
            return bool(found)

        self._wait(next_one, timeout_s, f"{name} {fields or ''}")
        return found[0]

    def wait_for_any(self, names: set[str], timeout_s: float = 90.0, **fields: Any) -> None:
        """Returns when there was such an event."""
        self._wait(lambda: any(self.named(n, **fields) for n in names), timeout_s, f"any of {names}")

    def wait_for_count(self, count: int, name: str, timeout_s: float = 90.0, **fields: Any) -> list[Event]:
        """Returns when there were so many such events in all; all of them."""
        found: list[Event] = []

        def enough() -> bool:
            found[:] = self.named(name, **fields)
            return len(found) >= count

        self._wait(enough, timeout_s, f"{count} x {name}")
        return found

    def named(self, name: str, **fields: Any) -> list[Event]:
        """All events so far of that name with these fields."""
        with self._written:
            self._read_events()
            return [e for e in self.events if e["event"] == name and fields.items() <= e.items()]

    def _wait(self, there: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        with self._written:
            while True:
                ended = not self._reader.is_alive()
                self._read_events()
                if there():
                    return
                left_s = deadline - time.monotonic()
                if ended or left_s <= 0:
                    why = "the job ended before" if ended else f"not within {timeout_s:g} s:"
                    raise AssertionError(f"{why} {what}\n{self.tail()}")
                # Its reader's end is no notification.
                self._written.wait(min(left_s, 0.5))

    def wait_for_line(self, words: str, timeout_s: float = 90.0) -> None:
        """Until it has said so on stderr: where the events of a full disk are."""
        deadline = time.monotonic() + timeout_s
        with self._written:
            while not any(words in line for line in self._lines):
                if not self._reader.is_alive() or time.monotonic() > deadline:
                    raise AssertionError(f"it has not said {words!r}:\n{self.tail()}")
                self._written.wait(0.5)

    @property
    def lines(self) -> list[str]:
        """What it has said on stderr."""
        with self._written:
            return list(self._lines)

    def tail(self) -> str:
        return "".join(self._lines[-40:])

    def _read_lines(self) -> None:
        # An event is in events.jsonl before its line is on stderr.
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._written:
                self._lines.append(line)
                self._written.notify_all()

    def _read_events(self) -> None:
        with suppress(FileNotFoundError), (self.run_dir / "events.jsonl").open("rb") as log:
            log.seek(self._offset)
            data = log.read()
            self._offset += len(data)
            *whole, self._partial = (self._partial + data).split(b"\n")
            self.events += [json.loads(line) for line in whole]

    # --- its processes ------------------------------------------------------------------------------

    def pid(self, actor: str) -> int:
        """Of the newest life of a process that the root started, such as `cell-1`."""
        started = [e for e in self.named("process_started") if e["actor"].partition("#")[0] == actor]
        return int(started[-1]["pid"])

    def rank_pid(self, cell: int, rank: int = 0) -> int:
        return logging_to(self.run_dir / "logs")[f"cell-{cell}-rank-{rank}"]

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def exit(self, timeout_s: float = 90.0) -> int:
        """Its exit code, when it has ended and all its events and its output are read."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended within {timeout_s:g} s:\n{self.tail()}") from None
        self._reader.join(10.0)
        self.named("")
        assert self.process.stdout is not None
        self._output = self.process.stdout.read()
        return code

    def summary(self) -> dict[str, Any]:
        """The last line of its output."""
        return json.loads(self._output.splitlines()[-1])  # type: ignore[no-any-return]

    # --- what it leaves -----------------------------------------------------------------------------

    @property
    def folders(self) -> tuple[Path, Path]:
        """Its sockets' and its shared memory's."""
        (listening,) = self.named("proxy_listening")
        sockets = Path(listening["unix_socket"]).parent.parent
        return sockets, Path("/dev/shm") / sockets.name

    def assert_nothing_left(self, grace_s: float = 30.0) -> None:
        """No process, no port, no folder. The harnesses' guardian goes last, within `grace_s`."""
        assert not wait_gone(processes(self.run_dir), grace_s)
        assert [folder for folder in self.folders if folder.exists()] == []
        (listening,) = self.named("proxy_listening")
        address = urlsplit(listening["base_url"])
        with socket.socket() as probe:
            assert probe.connect_ex((address.hostname, address.port)) != 0

    def clean(self) -> None:
        """Whatever the test came to, nothing of the job stays."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in processes(self.run_dir):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_gone(processes(self.run_dir), 5.0)
        self._reader.join(5.0)
        for listening in self.named("proxy_listening"):
            sockets = Path(listening["unix_socket"]).parent.parent
            shutil.rmtree(sockets, ignore_errors=True)
            shutil.rmtree(Path("/dev/shm") / sockets.name, ignore_errors=True)


@contextmanager
def running(
    run_dir: Path, *overrides: str, resume: bool = False, forks: bool = False
) -> Iterator[RunningJob]:
    """The quickstart with `overrides`, in `run_dir`. With `forks` it has a fork server of its own, as outside
    of tests, else that of the tests."""
    job = RunningJob(run_dir, overrides, resume=resume, forks=forks)
    try:
        yield job
    finally:
        job.clean()


def environment(run_dir: Path, forks: bool) -> dict[str, str]:
    """Of a process that is of a job, with a fork server of its own or that of the tests."""
    without = {FORK_SERVER} if forks else set()
    return {k: v for k, v in os.environ.items() if k not in without} | {"GYRE_TEST_RUN": str(run_dir)}


def kill(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)


def logging_to(folder: Path) -> dict[str, int]:
    """Processes by the logs of that folder to which they write."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            log = Path(os.readlink(entry / "fd" / "1"))
            if log.parent == folder.resolve():
                found[log.stem] = int(entry.name)
    return found


def joined_folder(pid: int) -> Path:
    """In shared memory, of a machine that has joined: it holds a lock on it."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.add(Path(os.readlink(entry)))
    (folder,) = (path for path in found if path.name.startswith("gyre-join-"))
    return folder


def processes(run_dir: Path) -> list[int]:
    """Of a job: the root's children inherit the run folder's name in their environment, and what a harness is
    told has it too. A rank that another process has forked writes its log there."""
    found = [*logging_to(run_dir / "logs").values()]
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and str(run_dir).encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return sorted({*found})


def wait_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Waits for the end of processes; those that are not gone in time."""
    deadline = time.monotonic() + timeout_s
    left = []
    for pid in pids:
        with suppress(ProcessLookupError):
            watch = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(watch, select.POLLIN)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    left.append(pid)
            finally:
                os.close(watch)
    return left


def cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """Seconds of CPU that each process has used."""
    used = {}
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used[pid] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return used


# --- what the journal says ---------------------------------------------------------------------------


def assert_each_execution_ended_once(job: RunningJob) -> None:
    """Of a job that was never resumed: what was dispatched, has ended, and was counted once."""
    dispatched = sum(event["executions"] for event in job.named("dispatch"))
    finished = Counter(event["execution"] for event in job.named("execution_finished"))
    with JournalReader(job.run_dir / "journal.db") as journal:
        rows = journal.executions()
    assert [row.spec.execution for row in rows if row.ended is None] == []
    assert len(rows) == dispatched == len(finished)
    assert set(finished.values()) == {1}


def assert_each_micro_step_counts_once(run_dir: Path, steps: int) -> None:
    """Every planned micro-step is in exactly one accepted contribution of its step, and every step was
    committed."""
    with JournalReader(run_dir / "journal.db") as journal:
        assert [committed.step for committed in journal.steps()] == list(range(steps))
        for step in range(steps):
            planned = Counter(name for m in journal.step_members(step) for name in m.micro_steps)
            counted = Counter(name for m in journal.contributions(step) for name in m.micro_steps)
            assert counted == planned
            assert set(planned.values()) <= {1}


def weights(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of every tensor."""
    with safe_open(checkpoint / "model.safetensors", "numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def rise(run_dir: Path) -> tuple[float, float]:
    """How much the mean score rose from the first evaluation to the last, and its standard error; by task."""
    with JournalReader(run_dir / "journal.db") as journal:
        evals = [group.scores for group in journal.groups() if group.split == "eval"]
        task = {row.spec.execution: row.spec.task for row in journal.executions()}
    first, last = ({task[name]: score for name, score in scores.items()} for scores in (evals[0], evals[-1]))
    rises = [last[name] - first[name] for name in first.keys() & last.keys()]
    return statistics.mean(rises), statistics.stdev(rises) / math.sqrt(len(rises))
