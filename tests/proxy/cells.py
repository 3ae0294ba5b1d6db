"""Cells of one engine each, real ones that hand KV over, and the routes to them."""

from __future__ import annotations

import asyncio
import os
import zlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gyre.actors import Actor, ChildSpec, Node, Ref, Tell, handles
from gyre.cell.engine import (
    Chunk,
    Engine,
    GenerateRequest,
    KvManifest,
    KvRested,
    SamplingParams,
    Weights,
)
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.scripted import NoWeights, ScriptedEngine
from gyre.cell.messages import Abort, ExportKv, Generate, ImportKv, ReleaseKv, RestKv
from gyre.proxy.routes import Routes, Sample
from gyre.rdma import Backend, SharedMemory
from gyre.rdma.shm_backend import ShmBackend
from gyre.schedule.messages import OpenRoute, RouteClosed
from tests.proxy.scripted import Mourner

VOCAB = 997


def sample(request: GenerateRequest, tokens: Sequence[int], version: int) -> tuple[int, float]:
    """Depends on every token before, and on the version."""
    drawn = zlib.crc32(array("i", tokens).tobytes(), version + request.sampling.seed)
    return drawn % VOCAB, -(drawn % 1000) / 100.0


def answer(request: GenerateRequest, version: int = 0) -> tuple[list[int], list[float]]:
    """What the whole call samples where nothing disturbs it."""
    tokens, logprobs = list(request.prompt_ids), []
    for _ in range(request.sampling.max_new_tokens):
        token, logprob = sample(request, tokens, version)
        tokens.append(token)
        logprobs.append(logprob)
    return tokens[len(request.prompt_ids) :], logprobs


def request(call: str, session: str, ids: Sequence[int], new_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(seed=7, max_new_tokens=new_tokens, ignore_eos=True)
    return GenerateRequest(
        call=call, session=session, prompt_ids=tuple(ids), prompt_tokens=len(ids), sampling=sampling
    )


class Die(Tell, frozen=True, kw_only=True):
    """To an engine's actor."""


Fault = Callable[["Cell", KvManifest], Awaitable[None]]


@dataclass
class Cell:
    """`after_export` and `before_import` happen where the engine is asked for that."""

    number: int
    engine: Engine
    backend: Backend
    ref: Ref | None = None
    incarnation: int = 1
    after_export: Fault | None = None
    before_import: Fault | None = None


class EngineActor(Actor):
    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    @handles(Generate)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        async for chunk in self._cell.engine.generate(message.request):
            yield chunk

    @handles(Abort, concurrent=True)
    async def abort(self, message: Abort) -> None:
        await self._cell.engine.abort(message.call)

    @handles(ExportKv, concurrent=True)
    async def export_kv(self, message: ExportKv) -> KvManifest:
        manifest = await self._cell.engine.export_kv(message.session, message.lease_s, message.call)
        if self._cell.after_export is not None:
            await self._cell.after_export(self._cell, manifest)
        return manifest

    @handles(ImportKv, concurrent=True)
    async def import_kv(self, message: ImportKv) -> int:
        if self._cell.before_import is not None:
            await self._cell.before_import(self._cell, message.manifest)
        return await self._cell.engine.import_kv(message.manifest)

    @handles(ReleaseKv, concurrent=True)
    async def release_kv(self, message: ReleaseKv) -> bool:
        return await self._cell.engine.release_kv(message.pin)

    @handles(RestKv, concurrent=True)
    async def rest_kv(self, message: RestKv) -> KvRested:
        return await self._cell.engine.rest_kv(message.sessions, message.budget_s)

    @handles(Die)
    async def die(self, message: Die) -> None:
        raise RuntimeError("it was told to die")


@dataclass
class Cells:
    node: Node
    routes: Routes
    folder: Path
    weights: Callable[[int], Weights]
    cells: list[Cell] = field(default_factory=list)

    def open(self, cell: Cell) -> None:
        assert cell.ref is not None
        self.routes.open(
            OpenRoute(
                cell=cell.number,
                incarnation=cell.incarnation,
                engines=(cell.ref,),
                version=cell.engine.version or 0,
                capacity_calls=64,
                window_tokens=cell.engine.window_tokens,
            )
        )

    async def change(self, cell: Cell, version: int = 0) -> RouteClosed:
        """To train role and back."""
        closed = await self.routes.close(cell.number, lost=False, change=f"r{cell.number}")
        await cell.engine.sleep()
        await cell.engine.wake(self.weights(version))
        self.open(cell)
        return closed

    async def call(self, asked: GenerateRequest) -> Sample:
        return await self.routes.sample(asked)

    def left(self) -> list[str]:
        """What of pins is left in memory."""
        return [name for name in os.listdir(self.folder) if "-pin-" in name]


MakeEngine = Callable[[int, KvHome], Engine]


def scripted(pass_s: float = 0.0, kv_tokens: int = 65536, kv_rest_bytes: int = 0) -> MakeEngine:
    return lambda number, home: ScriptedEngine(
        sample,
        vocab=VOCAB,
        window_tokens=2048,
        kv_tokens=kv_tokens,
        block_tokens=8,
        max_batch=64,
        pass_s=lambda decoding, prompt_tokens: pass_s,
        open_weights=False,
        kv_home=home,
        kv_rest_bytes=kv_rest_bytes,
    )


@asynccontextmanager
async def cells(
    folder: Path,
    make: MakeEngine,
    *,
    count: int = 2,
    kv_budget_s: float = 10.0,
    wait_s: float = 20.0,
    kv_rests: bool = False,
    weights: Callable[[int], Weights] = NoWeights,
) -> AsyncIterator[Cells]:
    shared = SharedMemory(folder)
    async with Node(name="test") as node:
        made = Cells(node, Routes(wait_s, kv_budget_s, kv_rests=kv_rests), folder, weights)
        for number in range(count):
            backend = ShmBackend(shared)
            await backend.start()
            cell = Cell(number, make(number, KvHome(backend, shared, f"kv-cell{number}")), backend)
            await cell.engine.wake(weights(0))
            spec = ChildSpec(
                name=f"engine-{number}",
                start=lambda cell=cell: EngineActor(cell),  # type: ignore[misc]
                restart="temporary",
            )
            cell.ref = await node.spawn(spec)
            made.cells.append(cell)
            made.open(cell)
        refs = [cell.ref for cell in made.cells if cell.ref is not None]
        await node.spawn(ChildSpec(name="mourner", start=lambda: Mourner(refs)))
        yield made
        for cell in made.cells:
            await cell.engine.close()
            await cell.backend.close()
        await asyncio.sleep(0)
