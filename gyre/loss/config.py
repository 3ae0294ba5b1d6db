"""The job file's table about the loss."""

from __future__ import annotations

import msgspec


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GSPO (arXiv 2507.18071): the sequence-level ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
