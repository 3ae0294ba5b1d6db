"""Which backends there are, which of them this process can use, and why not the others."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import structlog

from gyre.rdma.base import Backend, Unusable
from gyre.rdma.shm import SharedMemory
from gyre.rdma.shm_backend import ShmBackend
from gyre.rdma.tcp import TcpBackend

BackendName = Literal["shm", "cuda_ipc", "tcp", "ucx", "mooncake", "nixl"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

log = structlog.get_logger()


class Probe(NamedTuple):
    """Of one backend. `why` not, and how to `fix` it; "" where it can be used."""

    name: BackendName
    why: str = ""
    fix: str = ""


def make_backend(
    name: BackendName, *, where: str, token: bytes, shared: SharedMemory, device: int = 0
) -> Backend:
    """By its name, not started. `where`: this machine's address, for those that reach other hosts; they need
    the `token` of the job. `shared`: for those within a host. `device`: the GPU, for those of GPUs. Raises
    Unusable."""
    match name:
        case "shm":
            return ShmBackend(shared)
        case "tcp":
            return TcpBackend(where, token)
        case "cuda_ipc":
            from gyre.rdma.cuda_ipc import CudaIpcBackend

            return CudaIpcBackend(shared, device)
        case "ucx":
            from gyre.rdma.ucx import UcxBackend

            return UcxBackend(where, token)
        case "mooncake":
            from gyre.rdma.mooncake import MooncakeBackend

            return MooncakeBackend(where, token)
        case "nixl":
            from gyre.rdma.nixl import NixlBackend

            return NixlBackend(where, token)


async def start_backend(
    name: BackendName, *, where: str, token: bytes, shared: SharedMemory, device: int = 0
) -> Backend:
    """Started; TCP, and a line that says why, where this process cannot use it. OSError where TCP cannot
    listen at `where`."""
    try:
        backend = make_backend(name, where=where, token=token, shared=shared, device=device)
        await backend.start()
    except (Unusable, OSError) as error:
        if name == "tcp":
            raise
        fix = error.fix if isinstance(error, Unusable) else ""
        why = error.why if isinstance(error, Unusable) else str(error)
        log.warning("rdma_unusable", backend=name, why=why, fix=fix, used="tcp")
        return await start_backend("tcp", where=where, token=token, shared=shared)
    return backend


async def probe(where: str = "127.0.0.1") -> list[Probe]:
    """Starts each, and ends it."""
    with tempfile.TemporaryDirectory(prefix="gyre-probe-", dir="/dev/shm") as folder:
        shared = SharedMemory(Path(folder))
        return [await _probe(name, where, shared) for name in BACKENDS]


async def _probe(name: BackendName, where: str, shared: SharedMemory) -> Probe:
    try:
        backend = make_backend(name, where=where, token=os.urandom(32), shared=shared)
    except Unusable as error:
        return Probe(name, error.why, error.fix)
    try:
        await backend.start()
    except OSError as error:
        return Probe(name, str(error), f"see whether {where} is an address of this machine")
    finally:
        await backend.close()
    return Probe(name)
