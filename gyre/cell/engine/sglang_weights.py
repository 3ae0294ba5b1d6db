"""How a SGLang server gets the weights of a version: three ways, one at a time per server."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from gyre.cell.engine.base import EngineFault, Weights
from gyre.cell.engine.sglang_client import SglangClient
from gyre.cell.engine.sglang_versions import Dialect
from gyre.cell.model import use_device

LOAD_TIMEOUT_S = 600.0
GROUP_TIMEOUT_S = 120.0

R = TypeVar("R")


class Load(Protocol):
    """Weights that were read, and are to be taken while the server runs nothing."""

    async def __call__(self) -> None: ...


class Thread:
    """One, for all that blocks: a pool's threads would come and go. What it does on a GPU is on `device`: on
    another each rank's process would take memory for a context."""

    def __init__(self, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="sglang", initializer=partial(use_device, device)
        )

    def run(self, work: Callable[..., R], *arguments: Any) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *arguments))

    def close(self) -> None:
        self._pool.shutdown(wait=False)


class Delivery(Protocol):
    """A way to a server."""

    def read(self, weights: Weights) -> AbstractAsyncContextManager[Load]:
        """Reads them, which the server need not wait for; what is called within has the server take them
        and drop its KV. Raises what `weights.open` does, EngineFault."""


class ByDisk:
    """A safetensors file in `folder`, which the server sees too: on one host in memory (tmpfs)."""

    def __init__(self, client: SglangClient, thread: Thread, folder: Path, model_folder: Path) -> None:
        self._client = client
        self._thread = thread
        self._folder = folder
        self._model_folder = model_folder

    @asynccontextmanager
    async def read(self, weights: Weights) -> AsyncIterator[Load]:
        folder = self._folder / f"v{weights.version}"

        async def load() -> None:
            body = {
                "model_path": str(folder),
                "load_format": "safetensors",
                "weight_version": str(weights.version),
                "flush_cache": True,
            }
            await self._client.command("/update_weights_from_disk", body, timeout_s=LOAD_TIMEOUT_S)

        try:
            await self._thread.run(self._write, weights, folder)
            yield load
        finally:
            await self._thread.run(shutil.rmtree, folder, True)

    def _write(self, weights: Weights, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("config.json", "generation_config.json"):
            if (self._model_folder / name).exists():
                shutil.copy(self._model_folder / name, folder / name)
        with weights.open() as tensors:
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
            whole.clear()


class ByGroup:
    """A process group of us and the server's `ranks`, made for each update and destroyed after it."""

    def __init__(
        self,
        client: SglangClient,
        thread: Thread,
        dialect: Dialect,
        *,
        host: str,
        ranks: int,
        backend: Literal["gloo", "nccl"],
        device: torch.device,
    ) -> None:
        self._client = client
        self._thread = thread
        self._dialect = dialect
        self._host = host
        self._world = ranks + 1
        self._backend = backend
        self._device = device
        self._updates = 0

    @asynccontextmanager
    async def read(self, weights: Weights) -> AsyncIterator[Load]:
        # What is read lies in memory that others may reuse: it is sent from there, at once.
        described = await self._thread.run(_described, weights)

        async def load() -> None:
            self._updates += 1
            name = f"gyre-{id(self):x}-{self._updates}"
            async with bracket(self._client, self._dialect):
                await self._update(weights, name, described)

        yield load

    async def _update(self, weights: Weights, name: str, described: dict[str, Any]) -> None:
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            self._host, 0, self._world, is_master=True, wait_for_workers=False
        )
        join = {
            "master_address": self._host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": self._world,
            "group_name": name,
            "backend": self._backend,
        }
        ours = self._thread.run(_join, store, name, self._world, self._backend)
        theirs = self._client.command("/init_weights_update_group", join, timeout_s=GROUP_TIMEOUT_S)
        group, _ = await both(ours, theirs)
        try:
            await self._broadcast(weights, name, group, described)
        finally:
            leave = self._client.command("/destroy_weights_update_group", {"group_name": name})
            await both(self._thread.run(torch.distributed.destroy_process_group, group), leave)

    async def _broadcast(self, weights: Weights, name: str, group: Any, described: dict[str, Any]) -> None:
        body = described | {
            "group_name": name,
            "flush_cache": True,
            "weight_version": str(weights.version),
        }
        update = self._client.command("/update_weights_from_distributed", body, timeout_s=LOAD_TIMEOUT_S)
        await both(self._thread.run(_send, weights, group, self._device), update)


class ByIpc:
    """CUDA memory of ours that the server maps: both on one host, `device` numbered alike for both."""

    def __init__(
        self, client: SglangClient, thread: Thread, dialect: Dialect, *, ranks: int, device: torch.device
    ) -> None:
        self._client = client
        self._thread = thread
        self._dialect = dialect
        self._ranks = ranks
        self._device = device

    @asynccontextmanager
    async def read(self, weights: Weights) -> AsyncIterator[Load]:
        tensors = await self._thread.run(_copied, weights, self._device)
        body = {
            "serialized_named_tensors": [await self._thread.run(_handles, tensors)] * self._ranks,
            "flush_cache": True,
            "weight_version": str(weights.version),
        }

        async def load() -> None:
            async with bracket(self._client, self._dialect):
                await self._client.command("/update_weights_from_tensor", body, timeout_s=LOAD_TIMEOUT_S)

        try:
            yield load
        finally:
            tensors.clear()
            await self._thread.run(_collect)


@asynccontextmanager
async def bracket(client: SglangClient, dialect: Dialect) -> AsyncIterator[None]:
    """Around an update, where the server's version has it."""
    if not dialect.bracket:
        yield
        return
    await client.command("/begin_weight_update", {"selector": "target"})
    try:
        yield
    finally:
        await client.command("/end_weight_update", {}, timeout_s=LOAD_TIMEOUT_S)


async def both(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Waits for both; the error of theirs says more. A part of ours that waits for the other side ends by
    its group's own time-out: gloo cannot be interrupted."""
    answers = await asyncio.gather(ours, theirs, return_exceptions=True)
    for answer in reversed(answers):
        if isinstance(answer, EngineFault):
            raise answer
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers[0], answers[1]


def _described(weights: Weights) -> dict[str, Any]:
    with weights.open() as tensors:
        return {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }


def _join(store: Any, name: str, world: int, backend: str) -> Any:
    """As SGLang does on its side, so that both meet under the same keys."""
    from torch.distributed import distributed_c10d as c10d

    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    group, _ = c10d._new_process_group_helper(
        world,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def _send(weights: Weights, group: Any, device: torch.device) -> None:
    with weights.open() as tensors:
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor.to(device).contiguous(), src=0, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _copied(weights: Weights, device: torch.device) -> dict[str, Tensor]:
    with weights.open() as tensors:
        copied = {name: tensor.to(device, copy=True, non_blocking=True) for name, tensor in tensors.items()}
        torch.cuda.synchronize(device)
    return copied


def _handles(tensors: dict[str, Tensor]) -> str:
    """What SGLang unpickles: handles of CUDA memory, not the weights."""
    import torch.multiprocessing  # noqa: F401  It teaches the pickler about tensors.

    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(tensors.items()))
    return base64.b64encode(buffer.getvalue()).decode()


def _collect() -> None:
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    torch.cuda.empty_cache()
