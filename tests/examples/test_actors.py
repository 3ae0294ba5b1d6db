"""The examples of docs/actors.md, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "actors"
GUIDE = ROOT / "docs" / "actors.md"

SAID = {
    "counter": ["[1, 3, 6]"],
    "supervision": [
        "ZeroDivisionError: division by zero",
        "still there: 0.5",
        "divider#1 died: RuntimeError: everything is forgotten",
        "a ref names one life",
        "divider#2 answers: 0.5",
    ],
    "process": [
        "another process: True",
        "168 primes, none twice: True, by finder#2",
        "finder#1 died: exit (killed by SIGKILL)",
    ],
    "simulated": ["20 seeds hold,", "the same seed is the same run: True"],
}


@pytest.mark.parametrize("name", SAID)
def test_an_example_says_what_the_guide_promises(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    lines = iter(done.stdout.splitlines())
    for said in SAID[name]:
        assert any(line.startswith(said) for line in lines), f"{said!r} is not in\n{done.stdout}"


def test_two_machines_reach_each_other(tmp_path: Path) -> None:
    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, EXAMPLES / "two_machines.py", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )

    with start("serve", "127.0.0.1", "token") as server:
        try:
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            with start("use", endpoint, "127.0.0.2", "token") as user:
                said, _ = user.communicate(timeout=50)
            lines = [line for line in said.splitlines() if not line.startswith("20")]
        finally:
            server.terminate()
            server.communicate(timeout=10)
    assert lines == [
        "found: [2, 3, 5, 7, 11, 13, 17, 19]",
        "run there: [11, 13, 17, 19]",
        "another process: True",
    ]


def test_the_guide_shows_the_counter_as_it_is() -> None:
    code = (EXAMPLES / "counter.py").read_text()
    assert textwrap.indent(code, "    ") in GUIDE.read_text()
    assert len([line for line in code.splitlines() if line.strip()]) == 15


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES.glob("*.py")])
def test_the_guide_names_each_example(name: str) -> None:
    assert f"examples/actors/{name}" in GUIDE.read_text()
