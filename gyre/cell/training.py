"""The training loop of a cell: claim, compute, hand over; on the core also commit."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from gyre.actors import Ref
from gyre.cell.messages import (
    Accept,
    Claim,
    HandOver,
    Idle,
    Lease,
    Manifest,
    ReturnLease,
    Stale,
    StepComplete,
    StopClaiming,
)
from gyre.cell.ranks import AskRanks
from gyre.cell.worker_messages import DropGradients, TrainMicroStep
from gyre.loss import MicroStepStats

log = structlog.get_logger()

# The journal waits for room on a full disk; contributions and claims wait with it.
ACCEPT_TIMEOUT_S = 24 * 3600.0


def staged_name(cell: int, step: int, which: str) -> str:
    """Of regions with a satellite's gradients, as far as all ranks share it."""
    return f"g{step}-c{cell}-{which}"


def staged_names(cell: int) -> str:
    """The pattern of all of a cell's."""
    return f"g*-c{cell}-*"


class Contributor(Protocol):
    """How a cell's contribution reaches the sum: the core adds it to its own, a satellite sends regions."""

    async def contribute(self, manifest: Manifest) -> bool:
        """Answers whether it counts."""

    async def commit(self, complete: StepComplete) -> int:
        """On the core: update, answer the new version."""

    async def pull(self, version: int) -> int:
        """Load the training snapshot, which is at least `version`; answer which it is."""


class TrainingLoop:
    """Runs until `leave`, then gives back what it has not computed and hands over what it has."""

    def __init__(
        self,
        *,
        cell: int,
        incarnation: int,
        core: bool,
        version: int,
        queue: Ref,
        ranks: AskRanks,
        contributor: Contributor,
        claim_timeout_s: float,
    ) -> None:
        self._cell = cell
        self._incarnation = incarnation
        self._core = core
        self._version = version
        self._queue = queue
        self._ranks = ranks
        self._contributor = contributor
        self._claim_timeout_s = claim_timeout_s
        self._held: list[Lease] = []
        self._stats = MicroStepStats()
        self._leaving = False
        self._finished = asyncio.Event()
        self._ended = asyncio.Event()
        self.micro_steps = 0
        self.busy_s = 0.0

    @property
    def version(self) -> int:
        """Of the weights that it trains under."""
        return self._version

    @property
    def is_leaving(self) -> bool:
        return self._leaving

    async def leave(self) -> None:
        """Ends the loop; returns when the contribution is handed over."""
        await self.finish()
        await self.hand_over()

    async def finish(self) -> None:
        """Claims no more; returns when what was claimed is computed or given back."""
        self._leaving = True
        await self._queue.tell(StopClaiming(cell=self._cell, incarnation=self._incarnation))
        await self._finished.wait()

    async def hand_over(self) -> None:
        """Returns when the contribution is handed over, after `finish`."""
        await self._ended.wait()

    async def run(self) -> None:
        while not self._leaving:
            claim = Claim(
                cell=self._cell,
                incarnation=self._incarnation,
                version=self._version,
                holds=tuple(lease.token for lease in self._held),
                core=self._core,
            )
            await self._act(await self._queue.ask(claim, timeout_s=self._claim_timeout_s))
        self._finished.set()
        if self._held:
            await self._hand_over()
        self._ended.set()

    async def _act(self, answer: Lease | HandOver | StepComplete | Idle | Stale) -> None:
        match answer:
            case Lease() if self._leaving:
                await self._give_back(answer)
            case Lease():
                await self._compute(answer)
            case HandOver():
                await self._hand_over()
            case StepComplete():
                self._version = await self._contributor.commit(answer)
            case Stale():
                await self._forget()
                self._version = await self._contributor.pull(answer.version)
            case Idle():
                pass

    async def _compute(self, lease: Lease) -> None:
        began = time.monotonic()
        for stats in await self._ranks(TrainMicroStep(micro_step=lease.micro_step)):
            self._stats += stats
        self._stats += MicroStepStats(micro_steps=1)
        self._held.append(lease)
        self.micro_steps += 1
        self.busy_s += time.monotonic() - began

    async def _hand_over(self) -> None:
        manifest = Manifest(
            step=self._held[0].micro_step.step,
            cell=self._cell,
            incarnation=self._incarnation,
            version=self._version,
            micro_steps=tuple(lease.micro_step.id for lease in self._held),
            tokens=tuple(lease.token for lease in self._held),
            checksums=(),
            stats=self._stats,
        )
        counts = await self._contributor.contribute(manifest)
        log.info(
            "contribution", cell=self._cell, step=manifest.step, micro_steps=len(self._held), counts=counts
        )
        if counts:
            self._held = []
            self._stats = MicroStepStats()
            return
        # The queue has ended the leases where it was the one who refused; then this changes nothing.
        for lease in self._held:
            await self._give_back(lease)
        await self._forget()

    async def _give_back(self, lease: Lease) -> None:
        give_back = ReturnLease(cell=self._cell, incarnation=self._incarnation, token=lease.token)
        await self._queue.tell(give_back)

    async def _forget(self) -> None:
        self._held = []
        self._stats = MicroStepStats()
        await self._ranks(DropGradients())


async def accept(queue: Ref, manifest: Manifest) -> bool:
    """Has the queue journal a contribution; False: it is forfeit."""
    return await queue.ask(Accept(manifest=manifest), timeout_s=ACCEPT_TIMEOUT_S)
