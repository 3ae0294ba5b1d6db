from __future__ import annotations

import subprocess
import sys

import pytest

ROOMS = ("actors", "rdma", "loss", "schedule", "trajectory", "proxy", "harness", "watch", "job", "recorded")
NEED_TORCH = {"gyre.loss.gspo"}
OF_CELL = ("gyre.cell", "gyre.cell.actor", "gyre.cell.config", "gyre.cell.messages", "gyre.cell.engine.base")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_the_root_process_does_not_import_torch(room: str) -> None:
    _imports_without_torch(f"""
import importlib, pkgutil
import gyre.{room} as room
for module in pkgutil.walk_packages(room.__path__, "gyre.{room}."):
    if module.name not in {NEED_TORCH!r} and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
""")


@pytest.mark.parametrize("module", OF_CELL)
def test_what_others_use_of_the_cell_room_does_not_import_torch(module: str) -> None:
    _imports_without_torch(f"import {module}")


def _imports_without_torch(code: str) -> None:
    check = "\nimport sys\nassert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0, ran.stderr
