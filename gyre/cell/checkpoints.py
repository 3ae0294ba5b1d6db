"""Checkpoints on disk: one folder a step, whole or not there."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from pathlib import Path

import msgspec
import structlog

log = structlog.get_logger()

MANIFEST = "gyre.json"
_STEP = re.compile(r"step-(\d{6})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; `folder` says which."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"checkpoint {folder}: {reason}")
        self.folder = folder
        self.reason = reason


class CheckpointFolder:
    """`step-000012/` holds what `AutoModelForCausalLM` and `AutoTokenizer` read, the optimizer's shards,
    and a manifest with every file's size and crc32, written last."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def path(self, step: int) -> Path:
        return self._folder / _name(step)

    def begin(self, step: int) -> Path:
        """An empty folder to fill, beside the step's place. What was never finished goes."""
        for left in self._folder.glob("partial-*"):
            self.discard(left)
        partial = self._folder / f"partial-{step:06d}"
        partial.mkdir(parents=True)
        return partial

    def discard(self, partial: Path) -> None:
        """Gives the room of an unfinished one back."""
        shutil.rmtree(partial, ignore_errors=True)

    def finish(self, partial: Path, step: int) -> Path:
        """Seals what was filled and moves it to its place; old ones go, and those of later steps, which an
        earlier life of the job has left and this one had no use for. Returns the place."""
        _seal(partial, step)
        shutil.rmtree(self.path(step), ignore_errors=True)
        partial.rename(self.path(step))
        kept = [known for known in self.steps() if known <= step][-self._keep :]
        for other in set(self.steps()).difference(kept):
            shutil.rmtree(self.path(other), ignore_errors=True)
        return self.path(step)

    def steps(self) -> list[int]:
        """Steps that have a folder, in order."""
        if not self._folder.is_dir():
            return []
        found = (_STEP.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def newest_whole(self) -> Path | None:
        """The newest checkpoint that is whole; a damaged one is reported and the one before is taken."""
        for step in reversed(self.steps()):
            try:
                check(self.path(step))
            except CheckpointError as error:
                log.warning("checkpoint_skipped", folder=str(error.folder), reason=error.reason)
            else:
                return self.path(step)
        return None


def check(folder: Path) -> int:
    """The step of a whole checkpoint. Raises CheckpointError naming the first file that is not as written."""
    manifest = _manifest(folder)
    for name, (size, checksum) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(folder, f"{name} is missing")
        if path.stat().st_size != size or _crc32(path) != checksum:
            raise CheckpointError(folder, f"{name} is not as it was written (size or checksum differ)")
    return manifest.step


def step_of(folder: Path) -> int:
    """Of a checkpoint that was checked: its files are not read again. Raises CheckpointError."""
    return _manifest(folder).step


def _manifest(folder: Path) -> _Manifest:
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(folder, f"has no {MANIFEST}: it was never finished") from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(folder, f"{MANIFEST} cannot be read: {error}") from error
    if folder.name != _name(manifest.step):
        raise CheckpointError(folder, f"{MANIFEST} says that it is of step {manifest.step}")
    return manifest


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What `gyre.json` says: size and crc32 of every other file by its name."""

    step: int
    files: dict[str, tuple[int, int]]


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _seal(folder: Path, step: int) -> None:
    files = {path.name: (path.stat().st_size, _crc32(path)) for path in sorted(folder.iterdir())}
    manifest = msgspec.json.encode(_Manifest(step=step, files=files))
    with (folder / MANIFEST).open("wb") as out:
        out.write(msgspec.json.format(manifest, indent=1))
        out.flush()
        os.fsync(out.fileno())


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
