import subprocess
import sys


def run():
    return subprocess.run([sys.executable, "answer.py"], capture_output=True, text=True, timeout=10)


def test_it_runs():
    assert run().returncode == 0


def test_the_number_is_in_what_it_prints():
    assert "42" in run().stdout


def test_it_prints_nothing_else():
    assert run().stdout.strip() == "42"
