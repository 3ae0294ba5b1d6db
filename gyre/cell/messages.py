"""The messages between a cell and the rest of the job."""

from __future__ import annotations

from typing import Literal

import msgspec

from gyre.actors import Ask, Ref, Stream, Tell
from gyre.cell.engine.base import Chunk, EngineMetrics, GenerateRequest, KvManifest, KvRested
from gyre.cell.engine.sampled import SampledLeg
from gyre.loss.microstep import MicroStep, MicroStepStats
from gyre.rdma import RegionHandle

CellRole = Literal["rollout", "train"]
SnapshotKind = Literal["training", "published"]
RoleOutcome = Literal["done", "turned_back", "failed"]


# --- the cell and the scheduler -----------------------------------------------------------------


class CellUp(Tell, frozen=True, kw_only=True):
    """A cell tells the WaterlevelActor that it lives, in rollout role or (a core that has no weights
    published yet) in none. `engines` are the refs that calls go to, one a data-parallel engine."""

    cell: int
    incarnation: int
    ref: Ref
    engines: tuple[Ref, ...]
    role: CellRole
    version: int
    capacity_calls: int
    window_tokens: int


class RoleChanged(msgspec.Struct, frozen=True, kw_only=True):
    """How a role change went: the role the cell ended in, the seconds of each of its states by name, in
    order. Where it is not `done` the cell is back in the role it had, for `cause`."""

    cell: int
    role: CellRole
    version: int
    seconds: float
    states_s: dict[str, float]
    outcome: RoleOutcome = "done"
    cause: str = ""


class RoleState(Tell, frozen=True, kw_only=True):
    """A CellActor to the WaterlevelActor: a state of the role change `change` is over. With a `cause` it
    failed."""

    cell: int
    change: str
    state: str
    seconds: float
    cause: str | None = None


class EnterTrain(Ask[RoleChanged], frozen=True, kw_only=True):
    """To a CellActor: leave rollout (its calls are handed over already), pull training weights, start
    claiming micro-steps."""

    change: str = ""


class EnterRollout(Ask[RoleChanged], frozen=True, kw_only=True):
    """To a CellActor: hand over what was computed, pull the published weights, wake the engines."""

    change: str = ""


class TurnBack(Tell, frozen=True, kw_only=True):
    """To a CellActor: the role change `change` is no longer wanted, for `cause`. From its next state on the
    cell goes back to the role it had."""

    change: str
    cause: str


class Retire(Ask[None], frozen=True, kw_only=True):
    """To a satellite that is about to be stopped: hand over what was computed, claim no more."""


class UpdateWeights(Ask[RoleChanged], frozen=True, kw_only=True):
    """To a CellActor in rollout role: take the published weights under live calls."""


class Publish(Ask[int], frozen=True, kw_only=True):
    """To the core: make the training weights the published ones. Answers the version."""


class SaveCheckpoint(Ask[str], frozen=True, kw_only=True):
    """To the core: write a checkpoint of the last committed step. Answers its folder."""


class CellStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a person sees of a cell."""

    cell: int
    role: CellRole
    changing: bool
    version: int
    micro_steps: int
    tokens_per_s: float
    busy_fraction: float
    engine: EngineMetrics


class GetStatus(Ask[CellStatus], frozen=True, kw_only=True):
    """To a CellActor."""


# --- calls --------------------------------------------------------------------------------------


class Generate(Stream[Chunk], frozen=True, kw_only=True):
    """To an engine's ref: one call. Cancelling the stream aborts it."""

    request: GenerateRequest


class Abort(Ask[None], frozen=True, kw_only=True):
    """To an engine's ref: end one call with finish reason `abort`; its tokens so far have been sent."""

    call: str


class ExportKv(Ask[KvManifest], frozen=True, kw_only=True):
    """To an engine's ref: pin the KV of `call`, or of the session's last one, for up to `lease_s`."""

    session: str
    lease_s: float
    call: str | None = None


class ImportKv(Ask[int], frozen=True, kw_only=True):
    """To an engine's ref: read it. Answers how many tokens were taken."""

    manifest: KvManifest


class ReleaseKv(Ask[bool], frozen=True, kw_only=True):
    """To an engine's ref: end the pin. False where it had ended before."""

    pin: str


class RestKv(Ask[KvRested], frozen=True, kw_only=True):
    """To an engine's ref, before it sleeps: keep KV of these sessions, the latest first, in host memory."""

    sessions: tuple[str, ...]
    budget_s: float


class EndSession(Ask[tuple[SampledLeg, ...]], frozen=True, kw_only=True):
    """To an engine's ref: no more calls of the session will come; those that live are aborted. Answers what
    was sampled for it there, and again whenever asked, until it is told to forget."""

    session: str


class ForgetSession(Tell, frozen=True, kw_only=True):
    """To an engine's ref: what it answered is written down."""

    session: str


# --- weights ------------------------------------------------------------------------------------


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable weights of one version in a region, leased by the reader until it is released. `checksum`:
    the `page_sum` of the region, where it was asked for."""

    version: int
    region: RegionHandle
    lease: int
    checksum: int | None = None


class GetSnapshot(Ask[Snapshot], frozen=True, kw_only=True):
    """To the core: the newest snapshot of that kind, leased to `cell` until its actor `reader` is dead. With
    `copied` it comes with its checksum."""

    cell: int
    kind: SnapshotKind
    reader: Ref | None = None
    copied: bool = False


class GetSnapshotMemory(Ask[tuple[RegionHandle, ...]], frozen=True, kw_only=True):
    """To the core, from a new life of `cell` on its own host: the memory that all snapshots are in, under its
    present names."""

    cell: int


class ReleaseSnapshot(Tell, frozen=True, kw_only=True):
    """To the core: the reader is done."""

    lease: int


# --- micro-steps --------------------------------------------------------------------------------


class Lease(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The claim was granted: compute this under `version`, keep the token for the contribution."""

    token: int
    version: int
    micro_step: MicroStep


class HandOver(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Nothing is left to claim in `step`: hand the contribution over, then claim again."""

    step: int


class StepComplete(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To the core only: every micro-step of `step` is in an accepted contribution. Scale the sum of
    gradients by `1 / executions`, clip, update. `stats` are the step's sums."""

    step: int
    executions: int
    stats: MicroStepStats
    cells: tuple[int, ...]


class Idle(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Nothing to do within the claim's patience; claim again."""


class Stale(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The cell holds other weights than the step trains under: pull the training snapshot of `version`,
    then claim again. What it held of an earlier step no longer counts."""

    version: int


class Claim(Ask[Lease | HandOver | StepComplete | Idle | Stale], frozen=True, kw_only=True):
    """To the MicroStepQueue, which answers when there is something to do. `version` is the weight
    version the cell holds; `holds` the lease tokens it has computed and not handed over."""

    cell: int
    incarnation: int
    version: int
    holds: tuple[int, ...]
    core: bool


class StopClaiming(Tell, frozen=True, kw_only=True):
    """To the MicroStepQueue: the cell leaves training; its waiting claim is answered with Idle at once."""

    cell: int
    incarnation: int


class ReturnLease(Tell, frozen=True, kw_only=True):
    """To the MicroStepQueue: this claim will not be computed (its cell leaves)."""

    cell: int
    incarnation: int
    token: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A cell's contribution: what counts in a step is this, not a micro-step's acknowledgement."""

    step: int
    cell: int
    incarnation: int
    version: int
    micro_steps: tuple[str, ...]
    tokens: tuple[int, ...]
    checksums: tuple[int, ...]
    stats: MicroStepStats


class StageContribution(Ask[bool], frozen=True, kw_only=True):
    """To the core: read the shards (one region a rank), check, have the queue accept, then add.
    Answers whether it counts; the core frees the regions either way. With `holder` they are on another
    machine: the core fetches them from that actor, and who sent this frees them."""

    manifest: Manifest
    regions: tuple[RegionHandle, ...]
    holder: Ref | None = None


class Accept(Ask[bool], frozen=True, kw_only=True):
    """The core to the MicroStepQueue: journal this contribution. False: a lease in it had expired, all
    of it is forfeit and its micro-steps are ready again."""

    manifest: Manifest


class StepCommitted(Tell, frozen=True, kw_only=True):
    """The core to the MicroStepQueue, which passes it on: the update is done, weights are `version`."""

    step: int
    version: int
    grad_norm: float
    lr: float
    seconds: float
    stats: MicroStepStats
    cells: tuple[int, ...]
    micro_steps_by_cell: dict[int, int] = {}


class CellGone(Ask[None], frozen=True, kw_only=True):
    """To the MicroStepQueue: this life of a cell is over; what it held is ready again."""

    cell: int
    incarnation: int
