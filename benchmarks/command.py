"""What the command lines of all benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.report import Report
from gyre.cell.config import SglangConfig


def parser(name: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=description)
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    made.add_argument("--quick", action="store_true", help="each thing once and briefly: a check of itself")
    return made


def chosen(
    made: argparse.ArgumentParser, only: str | None, default: Sequence[str], parts: Sequence[str]
) -> list[str]:
    """The parts that `only` names; without it `default`."""
    found = only.split(",") if only else [*default]
    if unknown := set(found) - set(parts):
        made.error(f"no part {', '.join(sorted(unknown))}: {', '.join(parts)}")
    return found


def add_sglang(made: argparse.ArgumentParser) -> None:
    """The options of `sglang_config`."""
    made.add_argument(
        "--sglang-python", type=Path, metavar="FILE", help="the interpreter of an environment with sglang"
    )
    made.add_argument("--sglang-path", default="", metavar="PATH", help="its PYTHONPATH")
    made.add_argument("--sglang-arguments", default="", metavar="TEXT", help="further flags of its server")


def sglang_config(options: argparse.Namespace) -> SglangConfig:
    return SglangConfig(
        python=options.sglang_python,
        arguments=tuple(options.sglang_arguments.split()),
        environment={"PYTHONPATH": options.sglang_path},
    )


def tell(report: Report, json: bool) -> None:
    report.print(Console())
    if json:
        print(report.json_line())
