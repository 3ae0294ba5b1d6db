"""The backends that are measured."""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

from gyre.rdma import Backend, BackendName, SharedMemory, make_backend
from gyre.rdma.cuda_ipc import CudaIpcBackend

NAMES = tuple(get_args(BackendName))
TOKEN = b"no secret: both ends are of this benchmark"


def made(name: str, folder: Path, device: int) -> Backend:
    """`device`: of those on GPUs."""
    shared = SharedMemory(folder)
    if name == "cuda_ipc":
        return CudaIpcBackend(shared, device)
    return make_backend(cast(BackendName, name), where="127.0.0.1", token=TOKEN, shared=shared)
