import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.harness.bubblewrap import Bubblewrap
from gyre.harness.guardian import kill_marked, marked
from gyre.harness.sandbox import Confined, Limits, Mount, ProcessSandbox, Sandbox

# Of this process: tests that run beside these must not be killed.
MARK = f"gyre-tests-{os.getpid()}/"
PATH = f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture(params=["process", pytest.param("bubblewrap", marks=needs_bwrap)])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> Sandbox:
    made: Sandbox = ProcessSandbox() if request.param == "process" else Bubblewrap(tmp_path / "sandbox")
    made.check()
    return made


@pytest.fixture
def confined(tmp_path: Path) -> Callable[..., Confined]:
    """Makes a command with a workspace, a home and a /tmp, each with a mark of its own."""
    number = itertools.count()
    for name in ("workspace", "home", "tmp"):
        (tmp_path / name).mkdir()

    def make(*command: str, socket: Path | None = None, file_bytes: int = 1 << 20, **limits: int) -> Confined:
        workspace = Mount(host=tmp_path / "workspace", inside="/workspace", writable=True)
        home = Mount(host=tmp_path / "home", inside="/home/agent", writable=True)
        temporary = Mount(host=tmp_path / "tmp", inside="/tmp", writable=True)
        return Confined(
            command=command,
            environment={"PATH": PATH, "SECRET": "given"},
            workspace=workspace,
            mounts=(home, temporary),
            socket=socket,
            mark=f"{MARK}{tmp_path.name}/{next(number)}/",
            limits=Limits(file_bytes=file_bytes, **limits),
        )

    return make


@pytest.fixture(autouse=True)
def nothing_left_behind() -> object:
    yield
    left = marked(MARK)
    kill_marked(MARK)
    assert not left, f"processes {left} were left"
