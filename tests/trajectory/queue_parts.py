"""Micro-steps, claims and manifests for tests of the queue."""

from __future__ import annotations

from gyre.cell.messages import Claim, Lease, Manifest
from gyre.loss.microstep import MicroStep, MicroStepStats, Trajectory

GROUPS_PER_STEP = 2


def group_name(number: int) -> str:
    return f"g{number:06d}"


def micro_steps(number: int, count: int) -> tuple[MicroStep, ...]:
    step = number // GROUPS_PER_STEP
    trajectory = Trajectory(
        execution=f"{group_name(number)}.00",
        leaf=0,
        role="main",
        token_ids=bytes(8),
        trainable=bytes([0, 1]),
        old_logprobs=bytes(8),
        versions=bytes(8),
        advantage=1.0,
        weight=1.0,
    )
    return tuple(
        MicroStep(
            id=f"{step}.{group_name(number)}.{index}",
            step=step,
            group=group_name(number),
            trajectories=(trajectory,),
        )
        for index in range(count)
    )


def claim(
    cell: int = 0,
    *,
    incarnation: int = 1,
    version: int = 0,
    holds: tuple[int, ...] = (),
    core: bool | None = None,
) -> Claim:
    return Claim(
        cell=cell,
        incarnation=incarnation,
        version=version,
        holds=holds,
        core=cell == 0 if core is None else core,
    )


def manifest(cell: int, leases: list[Lease], *, incarnation: int = 1, step: int = 0) -> Manifest:
    return Manifest(
        step=step,
        cell=cell,
        incarnation=incarnation,
        version=step,
        micro_steps=tuple(lease.micro_step.id for lease in leases),
        tokens=tuple(lease.token for lease in leases),
        checksums=(),
        stats=MicroStepStats(micro_steps=len(leases)),
    )
