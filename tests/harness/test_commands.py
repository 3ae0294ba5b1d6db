import sys
from pathlib import Path

import pytest

from gyre.harness.commands import ProgramMissing, base_environment, check_program, fill, named_files


def test_known_placeholders_are_replaced_and_other_braces_stay() -> None:
    words = ["{python}", "-c", "print({}, {'a': 1}, {unknown})", "--in={workspace}/{task}"]
    filled = fill(words, {"workspace": "/w", "task": "t"})
    assert filled == (sys.executable, "-c", "print({}, {'a': 1}, {unknown})", "--in=/w/t")


def test_what_was_filled_in_is_not_filled_again() -> None:
    assert fill(["{prompt}"], {"prompt": "say {key}", "key": "secret"}) == ("say {key}",)


def test_files_named_by_absolute_path_are_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    (mount,) = named_files(["python", str(script), str(script), str(tmp_path), "script.py", "/no/such"])
    assert (mount.host, mount.inside, mount.writable) == (script, str(script), False)


def test_the_jobs_environment_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert set(base_environment("/home", "/tmp")) == {"PATH", "HOME", "TMPDIR", "LANG"}


@pytest.mark.parametrize("program", ["sh", "{python}", "/bin/sh", "{workspace}/run.sh", "./run.sh"])
def test_programs_that_may_be_there(program: str) -> None:
    check_program("harness.command", [program])


@pytest.mark.parametrize("program", ["no-such-program", "/no/such/program", "/etc/passwd"])
def test_a_program_that_is_not_there_is_named(program: str) -> None:
    with pytest.raises(ProgramMissing, match=rf"^harness\.command: cannot start '{program}'"):
        check_program("harness.command", [program])
