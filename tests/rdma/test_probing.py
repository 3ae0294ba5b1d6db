"""Which backends can be used here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from gyre.cli import app
from gyre.rdma import BACKENDS, SharedMemory, Unusable, probe, start_backend
from gyre.rdma.mooncake import load as load_mooncake
from gyre.rdma.nixl import load as load_nixl
from tests.rdma.kinds import KINDS, TOKEN


async def test_all_but_that_of_gpus_can_be_used_and_that_says_why() -> None:
    found = {it.name: it for it in await probe()}
    assert tuple(found) == BACKENDS
    assert {name for name in KINDS if found[name].why} == set()
    missing = set(BACKENDS) - {name for name in found if not found[name].why}
    assert missing <= {"cuda_ipc"}
    for name in missing:
        assert "CUDA does not start: " in found[name].why and "GPU" in found[name].fix


def test_doctor_says_it() -> None:
    said = CliRunner().invoke(app, ["doctor", "--where", "192.0.2.1"])
    assert said.exit_code == 0
    words = " ".join(said.output.split())
    assert "shm yes" in words
    assert "see whether 192.0.2.1 is an address of this machine" in words


@pytest.mark.parametrize(
    ("load", "module", "package"),
    [(load_mooncake, "mooncake.engine", "mooncake"), (load_nixl, "nixl_cu13", "nixl")],
)
def test_a_library_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, load: object, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert callable(load)
    with pytest.raises(Unusable, match=f"backend '{package}' cannot be used: .*; pip install"):
        load()


async def test_what_cannot_be_used_is_said_and_tcp_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    with structlog.testing.capture_logs() as logged:
        backend = await start_backend(
            "nixl", where="127.0.0.1", token=TOKEN, shared=SharedMemory(tmp_path / "shared")
        )
    assert backend.name == "tcp"
    await backend.close()
    (line,) = [line for line in logged if line["event"] == "rdma_unusable"]
    assert (line["backend"], line["used"]) == ("nixl", "tcp")


def test_no_library_is_imported_before_it_is_needed() -> None:
    heavy = {"torch", "numpy", "ucxx", "nixl_cu13", "mooncake"}
    code = f"import gyre.rdma, sys; print(*{heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "\n"
