from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.harness.presets import PRESETS, PresetMissing
from gyre.harness.presets.installed import installed, version_in
from tests.harness.presets.programs import SAYS, telling, write_program

CLAUDE = PRESETS["claude-code"]


@pytest.mark.parametrize("name", SAYS)
def test_a_program_of_the_tested_version_is_taken(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    program = telling(tmp_path / preset.program, SAYS[name].format(preset.version))
    found = installed(preset, program)
    assert (found.program, found.version) == (str(program), preset.version)


@pytest.mark.parametrize("name", SAYS)
def test_another_version_is_named_with_the_wanted_one_and_how_to_have_it(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    program = telling(tmp_path / preset.program, SAYS[name].format("0.1.7"))
    with pytest.raises(PresetMissing) as raised:
        installed(preset, program)
    said = str(raised.value)
    assert f"harness.preset = '{name}': {program} is version 0.1.7, wanted is {preset.version}" in said
    assert preset.install in said
    assert 'harness.version = "0.1.7"' in said


def test_another_version_is_taken_where_the_job_wants_it(tmp_path: Path) -> None:
    program = telling(tmp_path / "claude", "2.2.0 (Claude Code)")
    assert installed(CLAUDE, program, "2.2.0").version == "2.2.0"
    with pytest.raises(PresetMissing, match=r"wanted is 2\.3\.0"):
        installed(CLAUDE, program, "2.3.0")


def test_a_program_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.harness.presets.installed.SEARCHED", (str(tmp_path),))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(
        PresetMissing, match=r"no program claude .*npm install -g @anthropic-ai/claude-code@2"
    ):
        installed(CLAUDE)
    with pytest.raises(PresetMissing, match=r"harness\.program: there is no program /no/such/claude"):
        installed(CLAUDE, Path("/no/such/claude"))


def test_it_is_found_on_the_path_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = telling(tmp_path / "bin" / "claude", CLAUDE.version)
    monkeypatch.setattr("gyre.harness.presets.installed.SEARCHED", ("/usr/bin", "/bin"))
    monkeypatch.setenv("PATH", str(program.parent))
    assert installed(CLAUDE).program == str(program)


def test_what_a_broken_program_says_is_shown(tmp_path: Path) -> None:
    program = write_program(tmp_path / "claude", "#!/bin/sh\necho native binary not installed >&2\nexit 1\n")
    with pytest.raises(PresetMissing, match=r"does not tell its version \(exit 1\): native binary not inst"):
        installed(CLAUDE, program)
    program = write_program(tmp_path / "claude", "no script at all")
    with pytest.raises(PresetMissing, match=r"claude cannot be run: .*Exec format error"):
        installed(CLAUDE, program)


def test_npm_packages_come_along_as_a_whole(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "node_modules"
    real = telling(
        packages / "@anthropic-ai" / "claude-code" / "node_modules" / "bin" / "cli.js", CLAUDE.version
    )
    link = tmp_path / "bin" / "claude"
    link.parent.mkdir()
    link.symlink_to(real)
    found = installed(CLAUDE, link)
    assert found.program == str(real)
    assert [(mount.host, mount.inside, mount.writable) for mount in found.mounts] == [
        (packages, str(packages), False)
    ]


def test_a_program_alone_comes_alone(tmp_path: Path) -> None:
    program = telling(tmp_path / "share" / "versions" / "claude", CLAUDE.version)
    (mount,) = installed(CLAUDE, program).mounts
    assert mount.host == program


def test_an_interpreter_outside_of_the_system_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not the name of a real one, which may be among the system's programs.
    node = write_program(tmp_path / "nvm" / "bin" / "a-users-node", f"#!/bin/sh\necho {CLAUDE.version}\n")
    program = write_program(tmp_path / "node_modules" / "cli.js", f"#!/usr/bin/env {node.name}\n")
    monkeypatch.setenv("PATH", str(node.parent))
    found = installed(CLAUDE, program)
    assert [mount.host for mount in found.mounts] == [tmp_path / "node_modules", node]
    assert found.path.split(":")[-1] == str(node.parent)


# How pip writes it, also where the path is too long for a first line.
@pytest.mark.parametrize("first", ["#!{}\n", """#!/bin/sh\n'''exec' "{}" "$0" "$@"\n' '''\n"""])
def test_a_python_environment_comes_with_the_python_that_it_is_made_of(first: str, tmp_path: Path) -> None:
    mini = PRESETS["mini-swe-agent"]
    environment = tmp_path / "venv"
    base = Path(sys.executable).resolve()
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(base)
    (environment / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    packages = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    about = packages / "mini_swe_agent-0.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Metadata-Version: 2.1\nName: mini-swe-agent\nVersion: {mini.version}\n")
    script = first.format(python) + "raise SystemExit('never run')\n"
    program = write_program(environment / "bin" / "mini", script)
    (environment / ".env").write_text("TOKEN=secret")
    hosts = [mount.host for mount in installed(mini, program).mounts]
    own = [environment / name for name in ("pyvenv.cfg", "bin", "lib")]
    base_parts = [host for host in hosts if host.is_relative_to(base.parent.parent)]
    in_system = base.parent.parent == Path("/usr")
    assert in_system or {base.parent, base.parent.parent / "lib"} <= set(base_parts)
    assert hosts == [*own, *base_parts]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Somebody's, with a Python and a harness in its `bin`, which is no environment."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    # Packages of a user, which are no Python.
    (tmp_path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    write_program(tmp_path / "bin" / "claude", f"#!{tmp_path}/bin/python3\nprint('{CLAUDE.version}')\n")
    return tmp_path


def test_a_home_folder_is_not_taken_for_an_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = f"/{Path(sys.executable).resolve().parts[1]}"
    monkeypatch.setattr("gyre.harness.presets.installed.SYSTEM", (system,))
    hosts = [mount.host for mount in installed(CLAUDE, home / "bin" / "claude").mounts]
    assert hosts == [home / "bin" / "claude", home / "bin" / "python3"]


def test_a_python_that_would_not_find_itself_in_a_sandbox_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.harness.presets.installed.SYSTEM", ())
    with pytest.raises(
        PresetMissing, match=r"the interpreter of .*/bin/python3, is in no Python environment"
    ):
        installed(CLAUDE, home / "bin" / "claude")


def test_no_secret_of_the_job_is_shown_to_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    script = f'#!/bin/sh\nenv > {tmp_path}/environment\necho "{CLAUDE.version}"\n'
    installed(CLAUDE, write_program(tmp_path / "claude", script))
    assert "secret" not in (tmp_path / "environment").read_text()


@given(st.text())
def test_any_text_has_a_version_or_none(text: str) -> None:
    found = version_in(text)
    assert found is None or (found in text and found[0].isdecimal() and "." in found)


@given(
    st.lists(st.integers(0, 9999), min_size=2, max_size=4),
    st.sampled_from(["", "-beta.1", "rc2", "+build"]),
    st.sampled_from(["{}", "codex-cli {}", "v{}", "{} (Claude Code)\nmore 1.2"]),
)
def test_the_version_among_words(numbers: list[int], suffix: str, words: str) -> None:
    version = ".".join(map(str, numbers)) + suffix
    assert version_in(words.format(version)) == version
