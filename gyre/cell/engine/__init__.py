"""Rollout engines behind one contract (`base.Engine`). `native.NativeEngine` runs a transformers model and is
imported from its own file, since it needs torch; nothing here does."""

from gyre.cell.engine.base import (
    Chunk,
    ContextOverflow,
    Engine,
    EngineAsleep,
    EngineFault,
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    KvLayout,
    KvManifest,
    KvPart,
    KvRested,
    KvUnavailable,
    OnPublish,
    SamplingParams,
    Weights,
    pack_ids,
    unpack_ids,
)
from gyre.cell.engine.sampled import SampledLeg

__all__ = [
    "Chunk",
    "ContextOverflow",
    "Engine",
    "EngineAsleep",
    "EngineFault",
    "EngineMetrics",
    "FinishReason",
    "GenerateRequest",
    "KvLayout",
    "KvManifest",
    "KvPart",
    "KvRested",
    "KvUnavailable",
    "OnPublish",
    "SampledLeg",
    "SamplingParams",
    "Weights",
    "pack_ids",
    "unpack_ids",
]
