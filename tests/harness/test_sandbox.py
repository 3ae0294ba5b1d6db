"""The contract of sandboxes, for each of them."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.harness.guardian import marked
from gyre.harness.output import Output
from gyre.harness.process import Exit
from gyre.harness.sandbox import Confined, Sandbox, run

Make = Callable[..., Confined]


async def ended(sandbox: Sandbox, confined: Confined, timeout_s: float = 30.0) -> tuple[Exit, str]:
    output = Output()
    return await run(sandbox, confined, output, timeout_s=timeout_s), output.tail()


async def test_a_command_runs_in_its_workspace(sandbox: Sandbox, confined: Make, tmp_path: Path) -> None:
    exit_, text = await ended(sandbox, confined("sh", "-c", "echo hello; echo written > file; exit 3"))
    assert (exit_.kind, exit_.code, text) == ("exited", 3, "hello\n")
    assert (tmp_path / "workspace" / "file").read_text() == "written\n"


async def test_standard_error_can_be_had_apart(sandbox: Sandbox, confined: Make) -> None:
    output, errors = Output(), Output()
    await run(sandbox, confined("sh", "-c", "echo out; echo err >&2"), output, errors, timeout_s=30.0)
    assert (output.tail(), errors.tail()) == ("out\n", "err\n")


async def test_it_has_its_environment_and_no_input(
    sandbox: Sandbox, confined: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_TEST_SECRET", "of the job")
    _, text = await ended(sandbox, confined("sh", "-c", "env; cat"))
    assert "SECRET=given" in text
    assert "of the job" not in text


async def test_a_command_that_is_not_there_never_started(sandbox: Sandbox, confined: Make) -> None:
    exit_, _ = await ended(sandbox, confined("no-such-program"))
    assert exit_.kind == "never_started"
    assert "no-such-program" in exit_.detail


async def test_a_command_that_may_not_run_never_started(
    sandbox: Sandbox, confined: Make, tmp_path: Path
) -> None:
    (tmp_path / "workspace" / "text").write_text("no program")
    exit_, _ = await ended(sandbox, confined("./text"))
    assert exit_.kind == "never_started"


async def test_a_program_of_the_workspace_runs(sandbox: Sandbox, confined: Make, tmp_path: Path) -> None:
    (tmp_path / "workspace" / "program").write_text("#!/bin/sh\necho mine\n")
    (tmp_path / "workspace" / "program").chmod(0o755)
    exit_, text = await ended(sandbox, confined("./program"))
    assert (exit_.code, text) == (0, "mine\n")


async def test_this_python_and_its_packages_are_there(sandbox: Sandbox, confined: Make) -> None:
    exit_, text = await ended(
        sandbox, confined(sys.executable, "-c", "import msgspec; print(msgspec.__name__)")
    )
    assert (exit_.code, text) == (0, "msgspec\n")


async def test_a_command_killed_by_a_signal(sandbox: Sandbox, confined: Make) -> None:
    exit_, _ = await ended(sandbox, confined("sh", "-c", "kill -9 $$"))
    assert (exit_.kind, exit_.signal) == ("killed", signal.SIGKILL)


async def test_the_process_that_is_told_of_can_be_killed(sandbox: Sandbox, confined: Make) -> None:
    exit_ = await run(
        sandbox,
        confined("sleep", "100"),
        Output(),
        timeout_s=30.0,
        on_start=lambda pid: os.kill(pid, signal.SIGKILL),
    )
    assert (exit_.kind, exit_.signal) == ("killed", signal.SIGKILL)


async def test_a_command_that_hangs_is_timed_out(sandbox: Sandbox, confined: Make) -> None:
    exit_, _ = await ended(sandbox, confined("sleep", "100"), timeout_s=0.3)
    assert exit_ == Exit(kind="timed_out")


TERRIBLE = "trap '' TERM INT HUP; sh -c \"trap '' TERM; sleep 100\" & setsid sleep 100 & sleep 100"


async def test_a_time_out_kills_all_that_it_started(sandbox: Sandbox, confined: Make) -> None:
    command = confined("sh", "-c", TERRIBLE)
    assert (await ended(sandbox, command, timeout_s=0.5))[0].kind == "timed_out"
    assert not marked(command.mark)


async def test_what_it_leaves_running_is_killed(sandbox: Sandbox, confined: Make, tmp_path: Path) -> None:
    command = confined("sh", "-c", "setsid sh -c 'sleep 0.3; touch late' & sleep 100 & exit 0")
    assert (await ended(sandbox, command))[0] == Exit(kind="exited", code=0)
    assert not marked(command.mark)


async def test_cancelling_kills_all_that_it_started(sandbox: Sandbox, confined: Make) -> None:
    command = confined("sh", "-c", TERRIBLE)
    started = asyncio.Event()
    task = asyncio.create_task(
        run(sandbox, command, Output(), timeout_s=60.0, on_start=lambda _: started.set())
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not marked(command.mark)


async def test_output_without_end_is_bounded(sandbox: Sandbox, confined: Make, tmp_path: Path) -> None:
    for timeout_s in (0.5, 5.0, 20.0):  # on a busy machine it may not have begun
        output = Output(tmp_path / f"log-{timeout_s}")
        exit_ = await run(sandbox, confined("sh", "-c", "yes garbage"), output, timeout_s=timeout_s)
        assert exit_.kind == "timed_out"
        log = (tmp_path / f"log-{timeout_s}").read_bytes()
        if len(log) > 50_000:
            break
    assert 50_000 < len(log) < 70_000
    assert b"bytes left out]" in log


async def test_files_are_bounded(sandbox: Sandbox, confined: Make, tmp_path: Path) -> None:
    command = confined("sh", "-c", "head -c 1000000 /dev/zero > big", file_bytes=65536)
    await ended(sandbox, command)
    assert (tmp_path / "workspace" / "big").stat().st_size == 65536


async def test_many_run_at_once(sandbox: Sandbox, confined: Make) -> None:
    ends = await asyncio.gather(*(ended(sandbox, confined("sh", "-c", f"exit {i}")) for i in range(12)))
    assert [exit_.code for exit_, _ in ends] == list(range(12))


async def test_no_file_descriptor_is_left(sandbox: Sandbox, confined: Make) -> None:
    await ended(sandbox, confined("true"))
    before = os.listdir("/proc/self/fd")
    await ended(sandbox, confined("true"))
    await ended(sandbox, confined("no-such-program"))
    await ended(sandbox, confined("sleep", "100"), timeout_s=0.1)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
