"""The core's fp32 master weights, the sum of a step's contributions, and the only optimizer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gyre.cell.config import TrainConfig
from gyre.cell.group import CellGroup

MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterWeights:
    """This rank's rows of every parameter in fp32, AdamW over them."""

    def __init__(self, rows: list[Tensor], config: TrainConfig) -> None:
        self.weights = [tensor.detach().float().clone() for tensor in rows]
        self.sum = [torch.zeros_like(weight) for weight in self.weights]
        self._config = config
        for weight in self.weights:
            weight.requires_grad_()
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )

    @torch.no_grad()
    def add(self, gradients: list[Tensor]) -> None:
        """A contribution to the step's sum."""
        for total, gradient in zip(self.sum, gradients, strict=True):
            total += gradient

    def update(self, step: int, scale: float, group: CellGroup) -> tuple[float, float]:
        """One optimizer step with the sum times `scale`, clipped by its norm over all ranks. Returns the norm
        before clipping and the learning rate. Raises FloatingPointError, and keeps the weights, where the
        norm is not finite."""
        squares = sum(float(total.double().square().sum()) for total in self.sum)
        norm = math.sqrt(group.sum(squares)) * scale
        if not math.isfinite(norm):
            raise FloatingPointError(f"step {step}: the gradient norm is {norm}")
        factor = scale * min(1.0, self._config.max_grad_norm / (norm + 1e-12))
        lr = learning_rate(self._config, step)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        for weight, total in zip(self.weights, self.sum, strict=True):
            weight.grad = total * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for total in self.sum:
            total.zero_()
        return norm, lr

    def state(self) -> dict[str, Tensor]:
        """Flat tensors for a checkpoint."""
        tensors = {f"weight.{index}": weight.detach() for index, weight in enumerate(self.weights)}
        for index, weight in enumerate(self.weights):
            for name, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"{name}.{index}"] = value
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes what `state` gave. Raises KeyError or RuntimeError where it is of another model."""
        with torch.no_grad():
            for index, weight in enumerate(self.weights):
                saved = tensors[f"weight.{index}"]
                if saved.shape != weight.shape:
                    raise RuntimeError(f"weight {index} is {tuple(saved.shape)}, not {tuple(weight.shape)}")
                weight.copy_(saved)
                if f"step.{index}" in tensors:
                    # AdamW keeps its step on the CPU.
                    moments = {name: tensors[f"{name}.{index}"].to(weight.device) for name in MOMENTS}
                    self.optimizer.state[weight] = {"step": tensors[f"step.{index}"], **moments}


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of a step from 0: a linear warm-up, then constant or falling to 0 after the last step."""
    warm = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    return config.lr * warm * (1.0 if config.lr_schedule == "constant" else 1.0 - step / config.steps)
