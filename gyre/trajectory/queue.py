"""The core of the MicroStepQueue: who computes which micro-step, and what counts. No I/O and no clock.

A micro-step is ready -> claimed -> accepted, and committed with its step. A claim is a lease of one life of a
cell (its number and incarnation); a contribution (`Manifest`) turns a set of leases into accepted
micro-steps, all of them or none. What a life holds is forfeit as a whole when it expires, and the sum it has
accumulated is then of no use, so each of its micro-steps is ready again.

Only the current step is claimed from: weights are fixed within a step. Group `g%06d` number n belongs to
step n // B, which is sealed when all its B groups were added. Version s is what step s trains under.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from gyre.cell.messages import Claim, HandOver, Idle, Lease, Manifest, Stale, StepComplete
from gyre.loss.microstep import MicroStep, MicroStepStats

CORE = 0

Answer = Lease | HandOver | StepComplete | Idle | Stale
Life = tuple[int, int]
Verdict = Literal["new", "known", "refused"]


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`lease_s`: how long a lease lives unless a claim names it as held. `patience_s`: how
    long a claim waits before it is answered `Idle`. `hand_over_patience_s`: how long a satellite with
    computed leases waits for more work of a step that is not sealed."""

    groups_per_step: int
    first_step: int = 0
    lease_s: float = 120.0
    patience_s: float = 20.0
    hand_over_patience_s: float = 5.0


class InvalidGroup(ValueError):
    """`group` cannot be added."""

    def __init__(self, group: str, reason: str) -> None:
        super().__init__(f"group {group!r}: {reason}")
        self.group = group
        self.reason = reason


class InvalidCommit(ValueError):
    """The core committed `step`, which may not be committed now."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step} cannot be committed: {reason}")
        self.step = step
        self.reason = reason


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """What may be claimed of the current step; `complete` when only the core's update is missing.
    `uncommitted` micro-steps are of any step."""

    step: int
    unclaimed: int
    uncommitted: int
    complete: bool


class QueueTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What was committed since the queue began."""

    steps: int = 0
    micro_steps_by_cell: dict[int, int] = {}

    @property
    def satellite_micro_steps(self) -> int:
        return sum(n for cell, n in self.micro_steps_by_cell.items() if cell != CORE)


class _Item:
    """One micro-step; `token` and `expires_at` while it is claimed."""

    def __init__(self, micro_step: MicroStep) -> None:
        self.micro_step = micro_step
        self.token: int | None = None
        self.expires_at = math.inf
        self.accepted = False

    @property
    def ready(self) -> bool:
        return self.token is None and not self.accepted


class _Step:
    def __init__(self) -> None:
        self.executions_by_group: dict[int, int] = {}
        self.items: dict[tuple[int, int], _Item] = {}
        self.contributions: list[Manifest] = []

    def next_ready(self) -> _Item | None:
        """The longest ready one, so that what is claimed last is short and the cells end together; of equally
        long ones the first by group, then by index in the group."""
        ready = [(-item.micro_step.length_tokens, key) for key, item in self.items.items() if item.ready]
        return self.items[min(ready)[1]] if ready else None

    @property
    def is_accepted(self) -> bool:
        return all(i.accepted for i in self.items.values())


class _Waiting:
    def __init__(self, claim: Claim, now: float, config: QueueConfig) -> None:
        self.claim = claim
        self.until = now + config.patience_s
        self.hand_over_at = now + config.hand_over_patience_s

    @property
    def life(self) -> Life:
        return (self.claim.cell, self.claim.incarnation)


class QueueCore:
    """Claims wait in the core under a key of the caller, and `poll` answers those that can be answered: call
    it after every other method, and again at `next_wake`. Times are seconds of any one monotonic clock."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._step = config.first_step
        self._steps: dict[int, _Step] = {}
        self._held: dict[Life, dict[int, _Item]] = {}
        self._gone: set[Life] = set()
        self._waiting: dict[int, _Waiting] = {}
        self._next_token = 1
        self._totals = QueueTotals()

    @property
    def step(self) -> int:
        """The current step: how many were committed."""
        return self._step

    @property
    def totals(self) -> QueueTotals:
        return self._totals

    def state(self) -> QueueState:
        current = self._current()
        return QueueState(
            step=self._step,
            unclaimed=sum(i.ready for i in current.items.values()),
            uncommitted=sum(len(s.items) for s in self._steps.values()),
            complete=self._is_complete(current),
        )

    def executions(self, step: int) -> int:
        """How many executions count in the mean of a step that is not committed yet."""
        return sum(self._steps[step].executions_by_group.values()) if step in self._steps else 0

    # --- what comes in ------------------------------------------------------------------------------

    def is_new(self, group: str, step: int, micro_steps: Iterable[MicroStep]) -> bool:
        """Whether `add_group` would change anything; raises InvalidGroup."""
        number = self._group_number(group)
        if number // self._config.groups_per_step != step:
            raise InvalidGroup(group, f"step is {step}, must be {number // self._config.groups_per_step}")
        for micro_step in micro_steps:
            if (micro_step.group, micro_step.step) != (group, step):
                raise InvalidGroup(group, f"micro-step {micro_step.id} is of another group or step")
        known = step in self._steps and number in self._steps[step].executions_by_group
        return step >= self._step and not known

    def add_group(self, group: str, step: int, executions: int, micro_steps: tuple[MicroStep, ...]) -> None:
        """Adds a planned group once; a repetition, or one of a committed step, changes nothing."""
        if not self.is_new(group, step, micro_steps):
            return
        number = self._group_number(group)
        target = self._steps.setdefault(step, _Step())
        target.executions_by_group[number] = executions
        for index, micro_step in enumerate(micro_steps):
            target.items[number, index] = _Item(micro_step)

    def claim(self, key: int, claim: Claim, now: float) -> None:
        """A claim waits until `poll` answers it. It supersedes the one of the same life that still waits
        (which nobody listens to any more: its lease would be lost)."""
        self.stop_claiming(claim.cell, claim.incarnation)
        self._waiting[key] = _Waiting(claim, now, self._config)

    def withdraw(self, key: int) -> None:
        self._waiting.pop(key, None)

    def stop_claiming(self, cell: int, incarnation: int) -> None:
        """The waiting claim of a life is to be answered `Idle`."""
        for waiting in self._waiting.values():
            if waiting.life == (cell, incarnation):
                waiting.until = -math.inf

    def return_lease(self, cell: int, incarnation: int, token: int) -> None:
        """A lease that will not be computed; a token that is not one of the life's changes nothing."""
        self._release((cell, incarnation), [token])

    def verdict(self, manifest: Manifest) -> Verdict:
        """Whether a contribution counts; one that was accepted already is `known`."""
        if manifest in self._current().contributions:
            return "known"
        held = self._held.get((manifest.cell, manifest.incarnation), {})
        named = dict(zip(manifest.tokens, manifest.micro_steps, strict=False))
        valid = (
            manifest.step == manifest.version == self._step
            and 0 < len(named) == len(manifest.tokens) == len(manifest.micro_steps)
            and all(t in held and held[t].micro_step.id == name for t, name in named.items())
        )
        return "new" if valid else "refused"

    def accept(self, manifest: Manifest) -> bool:
        """Counts a contribution, or forfeits all leases of it that are its sender's. Once for all: accepting
        it again answers the same and changes nothing."""
        verdict = self.verdict(manifest)
        if verdict == "refused":
            self._release((manifest.cell, manifest.incarnation), manifest.tokens)
        elif verdict == "new":
            items = self._release((manifest.cell, manifest.incarnation), manifest.tokens)
            for item in items:
                item.accepted = True
            self._current().contributions.append(manifest)
        return verdict != "refused"

    def check_commit(self, step: int, version: int) -> bool:
        """Whether `commit` would change anything: not if it was committed before. Raises InvalidCommit."""
        if step < self._step:
            return False
        if step > self._step or version != step + 1:
            raise InvalidCommit(step, f"the current step is {self._step}, the new version is {version}")
        if not self._is_complete(self._current()):
            raise InvalidCommit(step, "a micro-step of it is in no accepted contribution")
        return True

    def commit(self, step: int, version: int) -> None:
        """The core has updated: on to the next step."""
        if not self.check_commit(step, version):
            return
        by_cell = dict(self._totals.micro_steps_by_cell)
        for manifest in self._current().contributions:
            by_cell[manifest.cell] = by_cell.get(manifest.cell, 0) + len(manifest.micro_steps)
        self._totals = QueueTotals(steps=self._totals.steps + 1, micro_steps_by_cell=by_cell)
        self._steps.pop(step, None)
        self._step = version

    def cell_gone(self, cell: int, incarnation: int) -> int:
        """A life is over: what it held is ready again, and it is granted nothing any more. With the core
        dies the sum: every contribution of the step is void. Answers how many micro-steps came back."""
        life = (cell, incarnation)
        if life in self._gone:
            return 0
        self._gone.add(life)
        back = len(self._forfeit(life))
        if cell == CORE:
            current = self._current()
            for item in current.items.values():
                back += item.accepted
                item.accepted = False
            current.contributions.clear()
        return back

    def expire(self, now: float) -> dict[Life, int]:
        """Forfeits all that a life holds as soon as one lease of it is over; answers how much, by life.
        What a waiting claim names is held for as long as it waits."""
        for waiting in self._waiting.values():
            self._renew(waiting, now)
        late = [x for x, held in self._held.items() if any(i.expires_at <= now for i in held.values())]
        return {life: len(self._forfeit(life)) for life in late}

    # --- what goes out ------------------------------------------------------------------------------

    def poll(self, now: float) -> list[tuple[int, Answer]]:
        """The waiting claims that have an answer now, first come first served."""
        answers: list[tuple[int, Answer]] = []
        for key, waiting in list(self._waiting.items()):
            answer = self._answer(waiting, now)
            if answer is not None:
                del self._waiting[key]
                self._renew(waiting, now)
                answers.append((key, answer))
        return answers

    def next_wake(self, now: float) -> float | None:
        """When time alone may change something next."""
        waiting = self._waiting.values()
        times = [w.until for w in waiting] + [w.hand_over_at for w in waiting]
        times += [item.expires_at for held in self._held.values() for item in held.values()]
        return min((t for t in times if t > now), default=None)

    def _answer(self, waiting: _Waiting, now: float) -> Answer | None:
        claim = waiting.claim
        if now >= waiting.until:
            return Idle()
        if waiting.life in self._gone or claim.version > self._step:
            # Weights newer than the step: its commit is on the way here.
            return None
        if claim.version < self._step:
            return Stale(version=self._step)
        if not set(claim.holds) <= self._held.get(waiting.life, {}).keys():
            # Its contribution can no longer count: the sooner it is refused, the sooner the cell begins anew.
            return HandOver(step=self._step)
        current = self._current()
        item = current.next_ready()
        if item is not None:
            return self._grant(waiting.life, item, now)
        sealed = self._is_sealed(current)
        if claim.holds and (sealed or (not claim.core and now >= waiting.hand_over_at)):
            return HandOver(step=self._step)
        return self._step_complete(current) if claim.core and self._is_complete(current) else None

    def _grant(self, life: Life, item: _Item, now: float) -> Lease:
        item.token = self._next_token
        item.expires_at = now + self._config.lease_s
        self._next_token += 1
        self._held.setdefault(life, {})[item.token] = item
        return Lease(token=item.token, version=self._step, micro_step=item.micro_step)

    def _step_complete(self, current: _Step) -> StepComplete:
        return StepComplete(
            step=self._step,
            executions=self.executions(self._step),
            stats=sum((m.stats for m in current.contributions), MicroStepStats()),
            cells=tuple(sorted({m.cell for m in current.contributions})),
        )

    # --- state --------------------------------------------------------------------------------------

    def _current(self) -> _Step:
        return self._steps.setdefault(self._step, _Step())

    def _is_sealed(self, step: _Step) -> bool:
        return len(step.executions_by_group) == self._config.groups_per_step

    def _is_complete(self, step: _Step) -> bool:
        return self._is_sealed(step) and step.is_accepted

    def _renew(self, waiting: _Waiting, now: float) -> None:
        """Only what the claim names: a lease whose answer got lost must expire."""
        held = self._held.get(waiting.life, {})
        for token in waiting.claim.holds:
            if token in held:
                held[token].expires_at = now + self._config.lease_s

    def _release(self, life: Life, tokens: Iterable[int]) -> list[_Item]:
        """Those of the tokens that are leases of the life end."""
        held = self._held.get(life, {})
        items = [held.pop(t) for t in tokens if t in held]
        for item in items:
            item.token = None
        if not held:
            self._held.pop(life, None)
        return items

    def _forfeit(self, life: Life) -> list[_Item]:
        return self._release(life, list(self._held.get(life, {})))

    def _group_number(self, group: str) -> int:
        digits = group[1:]
        if not group.startswith("g") or not (digits.isascii() and digits.isdigit()):
            raise InvalidGroup(group, "a group is named g and its number, such as g000012")
        return int(digits)
