"""Native engines over a random model of Qwen3's shape, and sessions whose KV is written, not computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.rdma.backends import made
from gyre.cell.engine import KvManifest, KvPart, OnPublish, pack_ids
from gyre.cell.engine.base import SUM_BYTES
from gyre.cell.engine.handover import Reservation
from gyre.cell.engine.kv_home import KvHome
from gyre.cell.engine.make import SLOT_BYTES
from gyre.cell.engine.native import NativeEngine
from gyre.rdma import Backend, RegionHandle, SharedMemory

BLOCK_TOKENS = 16
VOCAB = 4096
# Layers, hidden size, heads, KV heads, width of the MLP: on the CPU 0.6B's layers, on a GPU all of 1.7B's.
SHAPES = {"cpu": (2, 1024, 16, 8, 3072), "cuda": (28, 2048, 16, 8, 6144)}
SESSIONS = {"4k": 4096, "16k": 16384, "64k": 65536}


def tokens_of(session: str) -> tuple[int, ...]:
    """The same in every process; no two sessions share a prefix."""
    draw = torch.Generator().manual_seed(SESSIONS[session])
    return tuple(torch.randint(VOCAB, (SESSIONS[session],), generator=draw).tolist())


class _Own:
    """Weights that the model has already, in any version."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.version = 0
        self._tensors = {name: one.detach().clone() for name, one in model.named_parameters()}

    @contextmanager
    def open(self) -> Iterator[Mapping[str, torch.Tensor]]:
        yield self._tensors


class Bench:
    """An engine on `device` that hands KV over by `backend`, or by "host" memory, page-locked for GPUs."""

    def __init__(
        self,
        backend: str,
        folder: Path,
        name: str,
        device: torch.device,
        kv_tokens: int,
        on_publish: OnPublish = "recompute",
        max_batch: int = 4,
        kv_rest_bytes: int = 0,
    ) -> None:
        layers, hidden, heads, kv_heads, mlp = SHAPES[device.type]
        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=128,
            max_position_embeddings=2 * SESSIONS["64k"],
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        config.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        with device:
            self._model = Qwen3ForCausalLM._from_config(config).eval()
        slot_bytes = SLOT_BYTES if backend == "host" else 0
        self.backend: Backend = made("shm" if backend == "host" else backend, folder, device.index or 0)
        self.engine = NativeEngine(
            self._model,
            window_tokens=kv_tokens,
            kv_tokens=kv_tokens,
            block_tokens=BLOCK_TOKENS,
            max_batch=max_batch,
            chunk_interval_s=0.0,
            eos_token_ids=(),
            kv_home=KvHome(self.backend, SharedMemory(folder), f"kv-{name}", slot_bytes),
            on_publish=on_publish,
            kv_rest_bytes=kv_rest_bytes,
        )
        self.weights = _Own(self._model)

    async def start(self) -> None:
        await self.backend.start()
        await self.engine.wake(self.weights)

    async def close(self) -> None:
        await self.engine.close()
        await self.backend.close()

    async def write(self, session: str) -> None:
        """As if a call of the session had just ended."""
        await self.engine._on_lane(partial(self._write, session))

    async def forget(self) -> None:
        """What no call holds."""
        await self.engine._on_lane(self.engine._rollout._scheduler.pool.forget)

    def _write(self, session: str) -> None:
        rollout, runner = self.engine._rollout, self.engine._rollout._runner
        tokens = tokens_of(session)
        blocks = len(tokens) // BLOCK_TOKENS
        layout = runner.kv_layout(0)
        (memory,) = runner.kv_memory()
        nothing = RegionHandle(backend="", name="none", nbytes=2**62)
        reservation = Reservation(
            KvManifest(
                session=session,
                layout=layout,
                newest=0,
                tokens=pack_ids(tokens),
                blocks=tuple(range(blocks)),
                parts=(KvPart(heads=memory.heads, region=nothing, sums=bytes(SUM_BYTES * blocks)),),
                pin="",
                proof=nothing,
                lease_s=1.0,
            )
        )
        rollout.reserve(reservation)
        data = runner.kv.data  # type: ignore[attr-defined]
        for block in reservation.own:
            data[block].normal_()
        rollout.seal(reservation, lambda: None)
