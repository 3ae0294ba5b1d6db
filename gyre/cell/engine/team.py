"""The ranks of one engine in touch: from each to the leading one a line, for orders and answers, and what
adds up over all."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from gyre.cell.engine.sums import GroupSum, SocketSum, Sum

_HEADER = struct.Struct("<I")
_HELLO = struct.Struct("<II")
_LINE, _SUM = 0, 1


class Line:
    """One end of a socket. A thread reads, so that the other side's end is seen while nothing is asked."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        self._socket = connected
        self._frames = connected.makefile("rb")
        self._name = name
        self._closing = False
        self._reader: threading.Thread | None = None

    def start(self, on_frame: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """From now on frames are told, and once the end, unless it is closed here. On the thread."""
        reader = self._reader = threading.Thread(
            target=self._read, args=(on_frame, on_end), name=self._name, daemon=True
        )
        reader.start()

    def send(self, frame: bytes) -> None:
        """Raises OSError."""
        self._socket.sendall(_HEADER.pack(len(frame)) + frame)

    def close(self) -> None:
        """Not on its thread."""
        self._closing = True
        # The other side may have been faster.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join()
        self._frames.close()
        self._socket.close()

    def _read(self, on_frame: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        while (frame := self._next()) is not None:
            on_frame(frame)
        if not self._closing:
            on_end()

    def _next(self) -> bytes | None:
        try:
            header = self._frames.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return None
            (length,) = _HEADER.unpack(header)
            frame = self._frames.read(length)
        except OSError:
            return None
        return frame if len(frame) == length else None


class Team:
    """Rank 0 has a line to each other rank, in their order; another one has the one to rank 0."""

    def __init__(self, rank: int, lines: list[Line], total: Sum) -> None:
        self.rank = rank
        self.lines = lines
        self.total = total

    def close(self) -> None:
        """The lines first: NCCL waits until the others close too, and they do when they see that."""
        for line in self.lines:
            line.close()
        self.total.close()


def meet(
    store: Store,
    rank: int,
    ranks: int,
    socket_path: Path,
    *,
    device: torch.device,
    timeout_s: float,
    in_order: bool = False,
    by_group: str | None = None,
) -> Team:
    """All ranks at once, under a prefix of the store of their own; rank 0 takes a `socket_path` that is
    free. Blocks. They add up by a group of the backend `by_group`, by default of NCCL on GPUs and none on a
    CPU. Raises OSError, RuntimeError."""
    backend = by_group or ("nccl" if device.type == "cuda" else None)
    per_rank = 1 if backend else 2
    with ExitStack() as undo:
        if rank == 0:
            found = _lead(store, ranks, socket_path, per_rank, timeout_s, undo)
        else:
            found = _follow(store, rank, per_rank, timeout_s, undo)
        total: Sum
        if backend is not None:
            total = GroupSum(backend, store, rank, ranks, device, timeout_s, in_order)
        else:
            sums = [one for _, one in sorted((at, s) for (at, kind), s in found.items() if kind == _SUM)]
            for one in sums:
                wait_at_most(one, timeout_s)
            total = SocketSum(rank, sums)
        lines = [Line(found[at, _LINE], f"line-{at}") for at, kind in sorted(found) if kind == _LINE]
        undo.pop_all()
    return Team(rank, lines, total)


_Found = dict[tuple[int, int], socket.socket]


def _lead(store: Store, ranks: int, path: Path, per_rank: int, timeout_s: float, undo: ExitStack) -> _Found:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        try:
            listener.listen(per_rank * ranks)
            listener.settimeout(timeout_s)
            store.set("lines", str(path))
            found: _Found = {}
            while len(found) < per_rank * (ranks - 1):
                other = undo.enter_context(listener.accept()[0])
                other.settimeout(timeout_s)
                hello = other.recv(_HELLO.size, socket.MSG_WAITALL)
                other.settimeout(None)
                if len(hello) < _HELLO.size:
                    raise ConnectionResetError("a rank is gone")
                rank, kind = _HELLO.unpack(hello)
                if not 0 < rank < ranks or kind not in (_LINE, _SUM) or (rank, kind) in found:
                    raise ConnectionError(f"rank {rank} came twice, or is none of {ranks}")
                found[rank, kind] = other
            return found
        finally:
            path.unlink()


def _follow(store: Store, rank: int, per_rank: int, timeout_s: float, undo: ExitStack) -> _Found:
    path = store.get("lines").decode()
    found: _Found = {}
    for kind in range(per_rank):
        lead = undo.enter_context(socket.socket(socket.AF_UNIX))
        lead.settimeout(timeout_s)
        lead.connect(path)
        lead.sendall(_HELLO.pack(rank, kind))
        lead.settimeout(None)
        found[0, kind] = lead
    return found


def wait_at_most(one: socket.socket, timeout_s: float) -> None:
    """By the kernel: with a time-out of Python's own each call would poll first."""
    limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
