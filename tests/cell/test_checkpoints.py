"""Checkpoints on disk: whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gyre.cell.checkpoints import MANIFEST, CheckpointError, CheckpointFolder, check, step_of

WEIGHTS = "model.safetensors"


def save(folder: CheckpointFolder, step: int) -> Path:
    partial = folder.begin(step)
    (partial / WEIGHTS).write_bytes(bytes([step]) * 1000)
    (partial / "config.json").write_text("{}")
    return folder.finish(partial, step)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def test_what_was_saved_is_whole(folder: CheckpointFolder) -> None:
    path = save(folder, 12)
    assert path.name == "step-000012"
    assert check(path) == step_of(path) == 12
    assert folder.newest_whole() == path


def test_the_newest_ones_are_kept(folder: CheckpointFolder, tmp_path: Path) -> None:
    for step in (1, 2, 9, 10):
        save(folder, step)
    assert folder.steps() == [9, 10]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000009", "step-000010"]


def test_what_a_resumed_job_could_not_use_does_not_displace_what_it_saves(folder: CheckpointFolder) -> None:
    for step in (7, 8, 9):
        cut(save(folder, step) / WEIGHTS)
    save(folder, 1)
    assert folder.steps() == [1]
    assert folder.newest_whole() == folder.path(1)


def test_a_step_that_is_saved_again_is_the_new_one(folder: CheckpointFolder) -> None:
    save(folder, 1)
    partial = folder.begin(1)
    (partial / WEIGHTS).write_bytes(b"other")
    assert (folder.finish(partial, 1) / WEIGHTS).read_bytes() == b"other"
    assert check(folder.path(1)) == 1


def test_without_a_folder_there_is_none(folder: CheckpointFolder) -> None:
    assert folder.steps() == []
    assert folder.newest_whole() is None


def test_what_was_never_finished_does_not_count(folder: CheckpointFolder) -> None:
    first = save(folder, 1)
    partial = folder.begin(2)
    (partial / WEIGHTS).write_bytes(b"half")
    assert folder.steps() == [1]
    assert folder.newest_whole() == first


def test_what_was_never_finished_goes_with_the_next(folder: CheckpointFolder, tmp_path: Path) -> None:
    (folder.begin(1) / WEIGHTS).write_bytes(b"half")
    save(folder, 2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_other_things_in_the_folder_are_left_alone(folder: CheckpointFolder, tmp_path: Path) -> None:
    note = tmp_path / "checkpoints" / "step-12.txt"
    note.parent.mkdir()
    note.write_text("keep me")
    for step in range(4):
        save(folder, step)
    assert folder.steps() == [2, 3]
    assert note.exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def remove(path: Path) -> None:
    path.unlink()


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut, flip, lengthen, remove, make_folder])
@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST])
def test_damage_is_found_and_the_one_before_is_taken(
    folder: CheckpointFolder, name: str, damage: object
) -> None:
    first, second = save(folder, 1), save(folder, 2)
    damage(second / name)  # type: ignore[operator]
    with pytest.raises(CheckpointError) as caught:
        check(second)
    assert caught.value.folder == second
    with capture_logs() as logs:
        assert folder.newest_whole() == first
    assert [(entry["event"], entry["folder"]) for entry in logs] == [("checkpoint_skipped", str(second))]


def test_if_all_are_damaged_there_is_none(folder: CheckpointFolder) -> None:
    for step in (1, 2):
        cut(save(folder, step) / WEIGHTS)
    assert folder.newest_whole() is None


def test_a_checkpoint_under_the_name_of_another_step_is_refused(folder: CheckpointFolder) -> None:
    save(folder, 1).rename(folder.path(3))
    with pytest.raises(CheckpointError, match="says that it is of step 1"):
        check(folder.path(3))


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"null",
        b'{"step": 1}',
        b'{"step": "1", "files": {}}',
        b'{"step": 1, "files": {"a": 5}}',
        b"\xff",
    ],
)
def test_a_manifest_of_another_shape_is_an_error_of_the_checkpoint(
    folder: CheckpointFolder, manifest: bytes
) -> None:
    path = save(folder, 1)
    (path / MANIFEST).write_bytes(manifest)
    with pytest.raises(CheckpointError, match=f"{MANIFEST} cannot be read"):
        check(path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, 2000), bit=st.integers(0, 7), name=st.sampled_from([WEIGHTS, MANIFEST]))
def test_no_flipped_bit_passes_for_another_checkpoint(tmp_path: Path, at: int, bit: int, name: str) -> None:
    """Some are harmless (a space of the manifest becomes another); none is believed."""
    folder = CheckpointFolder(tmp_path, keep=1)
    path = folder.path(7) if folder.steps() else save(folder, 7)
    whole = (path / name).read_bytes()
    data = bytearray(whole)
    data[at % len(data)] ^= 1 << bit
    (path / name).write_bytes(data)
    try:
        assert check(path) == 7
        assert name == MANIFEST
    except CheckpointError:
        pass
    finally:
        (path / name).write_bytes(whole)
