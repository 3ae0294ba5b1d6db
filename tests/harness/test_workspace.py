import os
import socket
from pathlib import Path

import pytest

from gyre.harness.task import Part
from gyre.harness.workspace import WorkspaceTooLarge, copy_tree, lay, remove_tree

MB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "sub" / "file").write_text("content")
    (tmp_path / "secret").write_text("secret")
    return folder


def test_a_copy_has_files_folders_and_modes(source: Path, tmp_path: Path) -> None:
    (source / "sub" / "file").chmod(0o755)
    copy_tree(source, tmp_path / "copy", MB)
    assert (tmp_path / "copy" / "sub" / "file").read_text() == "content"
    assert (tmp_path / "copy" / "sub" / "file").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "copy" / "empty").is_dir()


def test_links_that_stay_inside_are_kept(source: Path, tmp_path: Path) -> None:
    (source / "link").symlink_to("sub/file")
    (source / "sub" / "up").symlink_to("../empty")
    (source / "dangling").symlink_to("nothing")
    copy_tree(source, tmp_path / "copy", MB)
    assert (tmp_path / "copy" / "link").read_text() == "content"
    assert os.readlink(tmp_path / "copy" / "sub" / "up") == "../empty"
    assert os.readlink(tmp_path / "copy" / "dangling") == "nothing"


def test_links_that_lead_out_are_left_out(source: Path, tmp_path: Path) -> None:
    (source / "absolute").symlink_to(tmp_path / "secret")
    (source / "relative").symlink_to("../secret")
    (source / "folder").symlink_to(tmp_path)
    (source / "here").symlink_to(".")
    (source / "roundabout").symlink_to("here/../secret")
    (source / "chain").symlink_to("absolute")
    (source / "loop").symlink_to("loop/..")
    copy_tree(source, tmp_path / "copy", MB)
    assert sorted(os.listdir(tmp_path / "copy")) == ["empty", "here", "loop", "sub"]
    for path in (tmp_path / "copy").rglob("*"):
        assert os.path.realpath(path).startswith(str(tmp_path / "copy"))


def test_pipes_and_sockets_are_left_out(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(source / "socket"))
        copy_tree(source, tmp_path / "copy", MB)
    assert sorted(os.listdir(tmp_path / "copy")) == ["empty", "sub"]


def test_a_tree_beyond_its_bound_is_not_copied(source: Path, tmp_path: Path) -> None:
    with (source / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(WorkspaceTooLarge, match="max_workspace_bytes"):
        copy_tree(source, tmp_path / "copy", MB)


def test_a_tree_without_permissions_is_copied_and_removed(source: Path, tmp_path: Path) -> None:
    (source / "sub" / "file").chmod(0)
    (source / "sub").chmod(0)
    copy_tree(source, tmp_path / "copy", MB)
    assert (tmp_path / "copy" / "sub" / "file").exists()
    (source / "sub").chmod(0)
    remove_tree(source)
    assert not source.exists()


def test_a_very_deep_tree_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(folder)
    assert not folder.exists()


def test_removing_nothing_is_no_error(tmp_path: Path) -> None:
    remove_tree(tmp_path / "nothing")


def test_parts_are_laid_one_over_the_other(tmp_path: Path) -> None:
    (tmp_path / "whole" / "deep").mkdir(parents=True)
    (tmp_path / "whole" / "deep" / "a").write_text("1")
    (tmp_path / "whole" / "b").write_text("2")
    (tmp_path / "other").write_text("3")
    parts = [
        Part(tmp_path / "whole", ""),
        Part(tmp_path / "other", "deep/a"),
        Part(tmp_path / "whole" / "deep", "again"),
        Part(None, "empty"),
    ]
    lay(parts, tmp_path / "made", 1 << 20)
    found = {p.relative_to(tmp_path / "made").as_posix() for p in (tmp_path / "made").rglob("*")}
    assert found == {"deep", "deep/a", "b", "again", "again/a", "empty"}
    assert (tmp_path / "made" / "deep" / "a").read_text() == "3"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "other", "whole"]
    with pytest.raises(WorkspaceTooLarge):
        lay(parts, tmp_path / "large", 1)
