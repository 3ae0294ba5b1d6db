"""The backends that run everywhere."""

from __future__ import annotations

from pathlib import Path

from gyre.rdma import Backend, SharedMemory
from gyre.rdma.mooncake import MooncakeBackend
from gyre.rdma.nixl import NixlBackend
from gyre.rdma.shm_backend import ShmBackend
from gyre.rdma.tcp import TcpBackend
from gyre.rdma.ucx import UcxBackend

KINDS = ("shm", "tcp", "ucx", "mooncake", "nixl")
TOKEN = b"the token of these backends, for tests"


def make(kind: str, folder: Path, token: bytes = TOKEN) -> Backend:
    if kind == "shm":
        return ShmBackend(SharedMemory(folder))
    if kind == "mooncake":
        return MooncakeBackend("127.0.0.1", token)
    if kind == "ucx":
        return UcxBackend("127.0.0.1", token)
    if kind == "nixl":
        return NixlBackend("127.0.0.1", token)
    return TcpBackend("127.0.0.1", token)
