"""What the processes below this one hold: memory, descriptors, sockets, threads; and GPU memory in all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

_PROC = Path("/proc")


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over processes. `regions` are files of the shared-memory folder, `mapped` the descriptors of such
    files, which are none of the other `descriptors`."""

    processes: int
    memory_bytes: int
    descriptors: int
    mapped: int
    sockets: int
    threads: int
    regions: int
    gpu_bytes: int = 0


def look(regions: Path, *, cuda: bool, here: bool = True) -> Resources:
    """Now, of all processes below this one and, if `here`, its own."""
    pids = [pid for pid in _family(os.getpid()) if here or pid != os.getpid()]
    held = [found for pid in pids if (found := _of(pid, regions)) is not None]
    memory, descriptors, mapped, sockets, threads = (sum(column) for column in zip(*held, strict=True))
    return Resources(
        processes=len(held),
        memory_bytes=memory,
        descriptors=descriptors,
        mapped=mapped,
        sockets=sockets,
        threads=threads,
        regions=len(os.listdir(regions)),
        gpu_bytes=_gpu_bytes() if cuda else 0,
    )


def _family(root: int) -> Iterator[int]:
    parents = {int(entry.name): _parent(entry) for entry in _PROC.iterdir() if entry.name.isdigit()}
    for pid in parents:
        above: int | None = pid
        while above not in (root, None, 0):
            above = parents.get(above)
        if above == root:
            yield pid


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _of(pid: int, regions: Path) -> tuple[int, ...] | None:
    """None where it has just ended."""
    process = _PROC / str(pid)
    try:
        lines = (process / "status").read_text().splitlines()
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "RssAnon" not in fields:
        return None
    links = [link for descriptor in descriptors if (link := _link(descriptor)) is not None]
    private = int(fields["RssAnon"].split()[0]) * 1024
    mapped = sum(link.startswith(f"{regions}/") for link in links)
    sockets = sum(link.startswith("socket:") for link in links)
    return private, len(links) - mapped, mapped, sockets, int(fields["Threads"])


def _link(descriptor: Path) -> str | None:
    """None where it is closed: to list our own takes one."""
    try:
        return os.readlink(descriptor)
    except OSError:
        return None


def _gpu_bytes() -> int:
    import torch

    used = 0
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        used += total - free
    return used
