"""Pages of KV in a shared folder: whole or absent, of one version, bounded."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.cell.engine.sglang_site.gyre_pages import HEADER_BYTES, Fence, Page, PageFolder, parse_fence

PAGE_BYTES = 1003
FILE_BYTES = HEADER_BYTES + PAGE_BYTES


def page(seed: int) -> Page:
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def pages(folder: Path, *, kind: str = "llama", limit_bytes: int = 1 << 30) -> PageFolder:
    return PageFolder(folder, kind=kind, page_bytes=PAGE_BYTES, limit_bytes=limit_bytes)


def read(kept: PageFolder, version: int, key: str) -> Page | None:
    found = np.zeros(PAGE_BYTES, np.uint8)
    return found if kept.get(version, key, found) else None


def test_a_page_is_found_by_whoever_shares_the_folder(tmp_path: Path) -> None:
    assert not pages(tmp_path).has(3, "a")
    assert pages(tmp_path).put(3, "a", page(1))
    assert pages(tmp_path).has(3, "a")
    found = read(pages(tmp_path), 3, "a")
    assert found is not None and np.array_equal(found, page(1))


def test_a_page_of_other_weights_or_another_kind_is_another(tmp_path: Path) -> None:
    pages(tmp_path).put(3, "a", page(1))
    assert read(pages(tmp_path), 4, "a") is None
    assert not pages(tmp_path).has(4, "a")
    assert read(pages(tmp_path, kind="qwen"), 3, "a") is None


def damaged(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: damaged(path, 0),
        lambda path: damaged(path, HEADER_BYTES - 1),
        lambda path: damaged(path, HEADER_BYTES),
        lambda path: damaged(path, FILE_BYTES - 1),
        lambda path: os.truncate(path, FILE_BYTES - 1),
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, FILE_BYTES + 1),
        lambda path: path.unlink(),
    ],
)
def test_a_page_that_is_not_whole_is_none(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    kept = pages(tmp_path)
    kept.put(3, "a", page(1))
    harm(tmp_path / "v3" / "llama" / "a")
    assert read(kept, 3, "a") is None


def test_a_short_page_is_put_again(tmp_path: Path) -> None:
    kept = pages(tmp_path)
    kept.put(3, "a", page(1))
    os.truncate(tmp_path / "v3" / "llama" / "a", 10)
    assert not kept.has(3, "a")
    assert kept.put(3, "a", page(1))
    assert read(kept, 3, "a") is not None


def test_readers_and_writers_of_one_page_see_it_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(seed: int) -> None:
        for _ in range(100):
            kept.put(0, "a", page(1))
            (tmp_path / "v0" / "llama" / "a").unlink(missing_ok=True)

    def look(seed: int) -> int:
        found = [read(kept, 0, "a") for _ in range(300)]
        assert all(np.array_equal(got, page(1)) for got in found if got is not None)
        return sum(got is not None for got in found)

    kept = pages(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, seed) for seed in range(2)]
        readers = [pool.submit(look, seed) for seed in range(2)]
        for done in (*writers, *readers):
            done.result()
    assert [path.name for path in (tmp_path / "v0" / "llama").iterdir() if path.name != "a"] == []


def test_what_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    kept, small = pages(tmp_path), pages(tmp_path, limit_bytes=16 * FILE_BYTES)
    for number in range(16):
        kept.put(number % 2, f"k{number}", page(number))
        os.utime(tmp_path / f"v{number % 2}" / "llama" / f"k{number}", (number, number))
    assert read(kept, 0, "k0") is not None
    assert kept.put(1, "k3", page(3))
    small.sweep()
    left = {path.name for path in tmp_path.glob("v*/llama/*")}
    assert left == {"k0", "k3", *(f"k{number}" for number in range(6, 16))}


def test_all_servers_together_stay_below_the_limit(tmp_path: Path) -> None:
    limit_bytes = 64 * FILE_BYTES
    servers = [pages(tmp_path, limit_bytes=limit_bytes) for _ in range(4)]
    most = 0
    for number in range(300):
        assert servers[number % 4].put(0, f"k{number}", page(0))
        most = max(most, sum(path.stat().st_size for path in tmp_path.glob("v0/llama/*")))
    assert limit_bytes / 2 < most <= limit_bytes


def test_what_a_killed_server_was_writing_goes(tmp_path: Path) -> None:
    kept = pages(tmp_path)
    kept.put(0, "a", page(0))
    old, new = (tmp_path / "v0" / "llama" / name for name in (".1-2", ".3-4"))
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (0, 0))
    kept.sweep()
    assert not old.exists()
    assert new.exists()
    assert kept.has(0, "a")


def test_one_sweeps_at_a_time(tmp_path: Path) -> None:
    kept = pages(tmp_path, limit_bytes=1)
    with (tmp_path / ".sweep").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept.put(0, "a", page(0))
        assert kept.has(0, "a")
    kept.sweep()
    assert not kept.has(0, "a")


def test_without_room_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "v0").write_text("a file where a folder must be")
    assert not pages(tmp_path).put(0, "a", page(0))


@pytest.mark.parametrize("key", ["", "../a", "a/b", ".hidden", "a\0"])
def test_a_key_that_leads_elsewhere_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        pages(tmp_path).put(0, key, page(0))
    with pytest.raises(ValueError, match="kind"):
        pages(tmp_path, kind=key)


def test_a_page_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1003 are expected"):
        pages(tmp_path).put(0, "a", page(0)[1:])


def version(fence: Fence) -> int | None:
    with fence.held() as found:
        return found


def test_a_fence_says_the_version_or_that_nothing_may_be_moved(tmp_path: Path) -> None:
    fence = Fence(tmp_path / "cell" / "fence")
    assert version(fence) is None
    fence.open(1234567)
    assert version(fence) == 1234567
    fence.open(8)
    assert version(Fence(tmp_path / "cell" / "fence")) == 8
    fence.shut()
    assert version(fence) is None


def test_a_fence_changes_when_no_page_is_on_its_way(tmp_path: Path) -> None:
    """And several may be, of several threads."""
    fence = Fence(tmp_path / "fence")
    fence.open(1)
    with fence.held() as outer:
        with fence.held() as inner:
            changing = threading.Thread(target=fence.shut)
            changing.start()
        changing.join(0.1)
        assert changing.is_alive()
        assert (outer, inner) == (1, 1)
        assert (tmp_path / "fence").read_bytes() == b"1\n"
    changing.join()
    assert version(fence) is None


@given(st.one_of(st.binary(max_size=40), st.from_regex(rb"\A\d{0,30}\n?\Z")))
def test_any_fence_is_a_version_or_none(content: bytes) -> None:
    found = parse_fence(content)
    assert found is None or (found >= 0 and int(content) == found and content.endswith(b"\n"))
