"""Regions in shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.rdma import RegionError, RegionHandle, SharedMemory


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gyre-test-", dir="/dev/shm") as parent:
        yield Path(parent) / "regions"


@pytest.fixture
def shared(folder: Path) -> SharedMemory:
    return SharedMemory(folder)


def handle(name: str, nbytes: int = 4, backend: str = "shm") -> RegionHandle:
    return RegionHandle(backend=backend, name=name, nbytes=nbytes)


def write(shared: SharedMemory, name: str, data: bytes) -> RegionHandle:
    with shared.allocate(name, len(data)) as region:
        region.buffer[:] = data
        return region.handle


def read(shared: SharedMemory, region: RegionHandle) -> bytes:
    with shared.open(region) as opened:
        return bytes(opened.buffer)


def test_what_one_side_writes_the_other_reads(folder: Path, shared: SharedMemory) -> None:
    region = write(shared, "w1", b"weights")
    assert region == handle("w1", 7)
    assert read(SharedMemory(folder), region) == b"weights"


def test_a_new_region_is_zero(shared: SharedMemory) -> None:
    with shared.allocate("w1", 5000) as region:
        assert bytes(region.buffer) == bytes(5000)


def test_ranks_fill_one_region_together(shared: SharedMemory) -> None:
    with shared.allocate("w1", 4) as first, shared.allocate("w1", 4) as second:
        first.buffer[:2] = b"ab"
        second.buffer[2:] = b"cd"
    assert read(shared, handle("w1")) == b"abcd"


def test_a_reader_changes_nothing(shared: SharedMemory) -> None:
    region = write(shared, "w1", b"abcd")
    with shared.open(region) as opened:
        opened.buffer[:] = b"zzzz"
    assert read(shared, region) == b"abcd"


def test_who_has_a_freed_region_open_keeps_it(shared: SharedMemory) -> None:
    region = write(shared, "w1", b"abcd")
    with shared.open(region) as opened:
        shared.free(region)
        shared.free(region)
        assert bytes(opened.buffer) == b"abcd"
    with pytest.raises(RegionError, match="region w1: is gone"):
        shared.open(region)


def test_a_name_can_be_used_again_with_another_size(shared: SharedMemory) -> None:
    shared.free(write(shared, "w1", b"abcd"))
    assert read(shared, write(shared, "w1", b"abcdef")) == b"abcdef"


def test_a_region_of_another_size_is_refused(shared: SharedMemory) -> None:
    write(shared, "w1", b"abcd")
    with pytest.raises(RegionError, match="exists with 4 bytes, not 5"):
        shared.allocate("w1", 5)
    with pytest.raises(RegionError, match="has 4 bytes, its handle says 5"):
        shared.open(handle("w1", 5))


def test_a_region_that_was_never_filled_is_refused(folder: Path, shared: SharedMemory) -> None:
    (folder / "w1").touch()
    with pytest.raises(RegionError, match="has 0 bytes"):
        shared.open(handle("w1", 0))


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_region_has_bytes(shared: SharedMemory, nbytes: int) -> None:
    with pytest.raises(RegionError, match=f"cannot allocate {nbytes} bytes"):
        shared.allocate("w1", nbytes)


@pytest.mark.parametrize(
    "name", ["", "..", "../w1", "/etc/passwd", "a/b", "-w1", ".w1", "a b", "w\n", "x" * 129]
)
def test_a_name_cannot_lead_out_of_the_folder(shared: SharedMemory, name: str) -> None:
    with pytest.raises(RegionError, match="no region name"):
        shared.allocate(name, 4)
    with pytest.raises(RegionError, match="no region name"):
        shared.open(handle(name))
    with pytest.raises(RegionError, match="no region name"):
        shared.free(handle(name))


def test_a_link_is_not_followed(folder: Path, shared: SharedMemory) -> None:
    secret = folder.parent / "secret"
    secret.write_bytes(b"abcd")
    (folder / "w1").symlink_to(secret)
    with pytest.raises(RegionError, match="w1"):
        shared.open(handle("w1"))
    with pytest.raises(RegionError, match="w1"):
        shared.allocate("w1", 4)
    shared.free(handle("w1"))
    assert secret.read_bytes() == b"abcd"


def test_what_is_no_file_is_refused(folder: Path, shared: SharedMemory) -> None:
    (folder / "w1").mkdir()
    with pytest.raises(RegionError, match="w1"):
        shared.allocate("w1", 4)
    with pytest.raises(RegionError, match="w1"):
        shared.open(handle("w1", os.stat(folder / "w1").st_size))


def test_another_backend_is_named(shared: SharedMemory) -> None:
    with pytest.raises(RegionError, match="is on backend 'ucx', not 'shm'"):
        shared.open(handle("w1", backend="ucx"))


def test_too_much_is_an_error_that_says_so(folder: Path, shared: SharedMemory) -> None:
    kept = write(shared, "w0", b"abcd")
    with pytest.raises(RegionError, match=rf"cannot allocate {1 << 44} bytes in {folder}: .*No space left"):
        shared.allocate("w1", 1 << 44)
    assert [path.name for path in folder.iterdir()] == ["w0"]
    assert read(shared, kept) == b"abcd"
    assert read(shared, write(shared, "w1", b"abcdef")) == b"abcdef"


def test_nothing_stays_open(shared: SharedMemory) -> None:
    region = write(shared, "w1", b"abcd")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        read(shared, region)
        for bad in (handle("w1", 5), handle("w2"), handle("..")):
            with pytest.raises(RegionError):
                shared.open(bad)
        with pytest.raises(RegionError):
            shared.allocate("w1", 5)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_only_its_owner_may_look(folder: Path, shared: SharedMemory) -> None:
    write(shared, "w1", b"abcd")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "w1").stat().st_mode & 0o777 == 0o600


def test_a_region_is_renamed(folder: Path, shared: SharedMemory) -> None:
    write(shared, "w2", b"old")
    renamed = shared.rename(write(shared, "w1", b"abcd"), "w2")
    assert read(shared, renamed) == b"abcd"
    assert [path.name for path in folder.iterdir()] == ["w2"]
    for gone in (handle("w1"), handle("w2", 5)):
        with pytest.raises(RegionError):
            shared.rename(gone, "w3")
    with pytest.raises(RegionError, match="no region name"):
        shared.rename(renamed, "../w3")


_HOLDER = """
import asyncio, signal, sys, os
from pathlib import Path
from gyre.rdma import SharedMemory
from gyre.rdma.shm_backend import ShmBackend

async def main():
    shared = SharedMemory(Path(sys.argv[1]), "kv-1-1")
    await (backend := ShmBackend(shared)).start()
    await backend.allocate("kv-1-1", 64)
    await backend.allocate("kv-1-1-pin", 64)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_the_next_life_frees_what_one_that_was_killed_has_left(folder: Path) -> None:
    for name in ("kv-1-0-pin", "kv-1-11-pin", "w1"):
        write(SharedMemory(folder), name, b"abcd")
    others = {*os.listdir(folder)}
    killed = subprocess.run([sys.executable, "-c", _HOLDER, folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = {*os.listdir(folder)} - others
    assert {name for name in left if not name.startswith(".")} == {"kv-1-1", "kv-1-1-pin"}
    assert len(left) == 3  # and a socket
    SharedMemory(folder).sweep_own()
    assert {*os.listdir(folder)} == others | left
    SharedMemory(folder, "kv-1-1").sweep_own()
    assert {*os.listdir(folder)} == others
