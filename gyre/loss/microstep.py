"""What a training cell computes at once: plain data, made by `gyre.trajectory`, used by `gyre.cell.train`."""

from __future__ import annotations

import msgspec


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One root-to-leaf path of a trajectory tree, with everything its loss needs frozen.

    All arrays have one entry per token of the path, little-endian bytes so that they cross
    processes without conversion: `token_ids` int32[T], `trainable` uint8[T] (1: sampled by the policy
    and trained by this trajectory), `old_logprobs` float32[T] (recorded at sampling, 0 where not
    sampled), `versions` int32[T] (weight version at sampling, -1 where not sampled), `kv_versions` int32[T]
    (of the oldest weights whose KV a token was sampled over: where that is not its version, its old
    log-probability is that of no one policy), or none where these are the `versions`.

    `advantage` is the execution's group-relative advantage; `weight` is this trajectory's share of its
    execution's trainable tokens, so that the weights of one execution sum to 1 (two-level mean).
    """

    execution: str
    leaf: int
    role: str
    token_ids: bytes
    trainable: bytes
    old_logprobs: bytes
    versions: bytes
    advantage: float
    weight: float
    kv_versions: bytes = b""

    @property
    def length_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def trainable_tokens(self) -> int:
        return self.trainable.count(1)


class MicroStep(msgspec.Struct, frozen=True, kw_only=True):
    """A packed set of trajectories of one group, a pure function of the planned group.

    `id` is `STEP.GROUP.INDEX`; it names the same content whoever computes it and however often. The
    trajectories are neighbours in the DFS order of the group's prefix tree; `tree_tokens` counts a prefix
    that they share once. `batches` are positions in `trajectories`: a rank computes as much as one of them
    at once, padded to its longest; none given, all are one.
    """

    id: str
    step: int
    group: str
    trajectories: tuple[Trajectory, ...]
    tree_tokens: int = 0
    batches: tuple[tuple[int, ...], ...] = ()

    @property
    def batched(self) -> tuple[tuple[Trajectory, ...], ...]:
        """One batch at least, be it empty."""
        if not self.batches:
            return (self.trajectories,)
        return tuple(tuple(self.trajectories[position] for position in batch) for batch in self.batches)

    @property
    def length_tokens(self) -> int:
        return sum(t.length_tokens for t in self.trajectories)


class MicroStepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the trajectories of micro-steps; they add, so that a step's figures are exact."""

    micro_steps: int = 0
    trajectories: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    loss: float = 0.0
    clipped: int = 0
    entropy: float = 0.0
    logprob_drift: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: MicroStepStats) -> MicroStepStats:
        return MicroStepStats(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )
