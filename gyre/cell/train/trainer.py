"""Forward, backward, accumulate: one rank's part of a micro-step."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gyre.cell.train.batch import Batch, collate
from gyre.cell.train.deal import deal
from gyre.cell.weights import local, parameters
from gyre.loss import LossConfig, MicroStep, MicroStepStats, Trajectory
from gyre.loss.gspo import gspo_loss, token_logprobs


class Trainer:
    """A training module, its gradients in fp32. Every batch's gradient is computed from zero and then
    added, so that it does not depend on what was accumulated before."""

    def __init__(
        self, model: PreTrainedModel, loss: LossConfig, temperature: float, rank: int, ranks: int
    ) -> None:
        self.model = model
        self._loss = loss
        self._temperature = temperature
        self._rank = rank
        self._ranks = ranks
        self.gradients: list[Tensor] = []
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forgets what was accumulated."""
        self.gradients = [torch.zeros_like(local(p), dtype=torch.float32) for p in parameters(self.model)]

    def micro_step(self, micro_step: MicroStep) -> MicroStepStats:
        """Accumulates the gradient of this rank's trajectories. Raises FloatingPointError on a loss that is
        not finite."""
        began = time.monotonic()
        stats = MicroStepStats()
        # Each rank has its part each time, be it empty: all of them run together.
        for parts in deal(micro_step, self._ranks):
            stats += self._batch(micro_step.id, parts[self._rank])
        return stats + MicroStepStats(seconds=time.monotonic() - began)

    def _batch(self, micro_step: str, mine: list[Trajectory]) -> MicroStepStats:
        loss, stats = self._forward(collate(mine, self.model.device))
        if not torch.isfinite(loss):
            raise FloatingPointError(f"micro-step {micro_step}: the loss is {float(loss.detach())}")
        # FSDP2 averages over the ranks, but the trajectories of a micro-step add up.
        torch.autograd.backward(loss * self._ranks)
        with torch.no_grad():
            for total, parameter in zip(self.gradients, parameters(self.model), strict=True):
                if parameter.grad is not None:
                    total += local(parameter.grad)
                parameter.grad = None
        lengths = sum(t.length_tokens for t in mine)
        return stats + MicroStepStats(trajectories=len(mine), tokens=lengths)

    def _forward(self, batch: Batch) -> tuple[Tensor, MicroStepStats]:
        # The logits at t predict token t + 1; only positions that some row trains go through the head.
        targets = batch.trainable[:, 1:]
        kept = targets.any(0).nonzero().squeeze(-1)
        if len(kept) == 0:
            kept = torch.zeros(1, dtype=torch.int64, device=batch.token_ids.device)
        if batch.token_ids.shape[1] == 1:
            logits = self.model(input_ids=batch.token_ids, use_cache=False, logits_to_keep=kept).logits
            return logits.float().sum() * 0.0, MicroStepStats()
        logits = self.model(input_ids=batch.token_ids, use_cache=False, logits_to_keep=kept).logits
        chosen = batch.token_ids[:, 1:][:, kept]
        logprobs, entropy = token_logprobs(logits, chosen, self._temperature)
        trainable = targets[:, kept]
        old = batch.old_logprobs[:, 1:][:, kept]
        result = gspo_loss(
            logprobs,
            old,
            trainable,
            batch.advantages,
            batch.weights,
            clip_low=self._loss.clip_low,
            clip_high=self._loss.clip_high,
        )
        with torch.no_grad():
            drift = torch.where(trainable, logprobs - old, 0.0).abs().sum()
            stats = MicroStepStats(
                trained_tokens=int(trainable.sum()),
                loss=float(result.loss.detach()),
                clipped=int(result.clipped.sum()),
                entropy=float(torch.where(trainable, entropy, 0.0).sum()),
                logprob_drift=float(drift),
            )
        return result.loss, stats
