"""What goes between ranks in a pass: the sum that every layer needs twice, and logits.

On a CPU it goes over Unix sockets: a sum of gloo passes several threads, and takes twenty times as long where
the numbers are few; and a group of gloo polls as long as it stands. Ranks are added up in their order,
whatever the size, so that a number does not depend on what is beside it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]


class Sum(Protocol):
    """Every rank calls it with the same shape, and gets the same bits. Raises OSError or RuntimeError where a
    rank is gone."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def side_by_side(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Rank 0 gets [rows, all columns] where each has [rows, its of `widths`]."""

    def abort(self) -> None:
        """From any thread: whoever waits in a sum gets an error."""

    def close(self) -> None:
        """All ranks at once."""


class SocketSum:
    """Of tensors in main memory: rank 0 adds up and tells the others, each over a socket of its own."""

    def __init__(self, rank: int, sockets: Sequence[socket.socket]) -> None:
        self._leads = rank == 0
        self._sockets = sockets

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if not self._leads:
            (lead,) = self._sockets
            lead.sendall(_bytes(x))
            return self._received(lead, torch.empty_like(x))
        # Rounded once, however many there are.
        total = x.float() if len(self._sockets) > 1 else x
        part = torch.empty_like(x)
        for other in self._sockets:
            total = total + self._received(other, part)
        total = total.to(x.dtype)
        for other in self._sockets:
            other.sendall(_bytes(total))
        return total

    def side_by_side(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        x = x.contiguous()
        if not self._leads:
            self._sockets[0].sendall(_bytes(x))
            return x
        others = zip(self._sockets, widths[1:], strict=True)
        return torch.cat([x, *(self._received(one, x.new_empty(len(x), width)) for one, width in others)], -1)

    def abort(self) -> None:
        for one in self._sockets:
            # It may be closed already, here or there.
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            one.close()

    def _received(self, source: socket.socket, into: torch.Tensor) -> torch.Tensor:
        left = _bytes(into)
        while left:
            count = source.recv_into(left)
            if not count:
                raise ConnectionResetError("a rank is gone")
            left = left[count:]
        return into


def _bytes(x: torch.Tensor) -> memoryview:
    numbers: Any = x.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


class GroupSum:
    """By a process group of its own, over `store`: of NCCL on GPUs. With `in_order`, what the ranks have is
    gathered and added up in their order, since a group chooses its order by the size."""

    def __init__(
        self,
        backend: str,
        store: Store,
        rank: int,
        ranks: int,
        device: torch.device,
        timeout_s: float,
        in_order: bool,
    ) -> None:
        self._ranks = ranks
        self._in_order = in_order
        self._aborted = False
        timeout = timedelta(seconds=timeout_s)
        prefixed = PrefixStore("sum", store)
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(prefixed, rank, ranks, options)
            self._group.eager_connect_single_device(device)
        else:
            self._group = dist.ProcessGroupGloo(prefixed, rank, ranks, timeout)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if not self._in_order:
            self._group.allreduce([x]).wait()
            return x
        parts = self._gathered(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def side_by_side(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        # All of one size, as a group wants them.
        parts = self._gathered(F.pad(x, (0, max(widths) - x.shape[-1])))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], -1)

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self._ranks)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return parts

    def abort(self) -> None:
        self._aborted = True
        if (group := self._group) is not None:
            group.abort()

    def close(self) -> None:
        if not self._aborted:
            self._group.shutdown()
        self._group = None
