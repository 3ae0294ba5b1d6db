from __future__ import annotations

import pytest
from msgspec.structs import replace

from gyre.cell.messages import Claim, HandOver, Idle, Lease, Stale, StepComplete
from gyre.loss.microstep import MicroStepStats
from gyre.trajectory.queue import Answer, InvalidCommit, InvalidGroup, QueueConfig, QueueCore
from tests.trajectory.queue_parts import GROUPS_PER_STEP, claim, group_name, manifest, micro_steps

CONFIG = QueueConfig(
    groups_per_step=GROUPS_PER_STEP, lease_s=100.0, patience_s=20.0, hand_over_patience_s=5.0
)


class Queue:
    """The core with a clock in hand."""

    def __init__(self, config: QueueConfig = CONFIG) -> None:
        self.core = QueueCore(config)
        self.now = 0.0
        self._key = 0

    def add(self, number: int, count: int, executions: int = 4) -> None:
        step = number // GROUPS_PER_STEP
        self.core.add_group(group_name(number), step, executions, micro_steps(number, count))

    def ask(self, message: Claim) -> Answer | None:
        """The answer that there is at once, else None: the claim waits."""
        self._key += 1
        self.core.claim(self._key, message, self.now)
        return dict(self.poll()).get(self._key)

    def poll(self) -> list[tuple[int, Answer]]:
        return self.core.poll(self.now)

    def later(self, seconds: float) -> list[Answer]:
        self.now += seconds
        self.core.expire(self.now)
        return [answer for _, answer in self.poll()]

    def lease(self, cell: int, holds: tuple[int, ...] = (), version: int = 0, incarnation: int = 1) -> Lease:
        answer = self.ask(claim(cell, holds=holds, version=version, incarnation=incarnation))
        assert isinstance(answer, Lease)
        return answer


def test_micro_steps_of_one_length_are_claimed_in_canonical_order_whatever_the_order_of_groups() -> None:
    queue = Queue()
    queue.add(1, 2)
    queue.add(0, 1)
    leases = [queue.lease(0), queue.lease(1), queue.lease(2)]
    assert [x.micro_step.id for x in leases] == ["0.g000000.0", "0.g000001.0", "0.g000001.1"]
    assert len({x.token for x in leases}) == 3


def test_the_longest_micro_step_is_claimed_first() -> None:
    queue = Queue()
    for number, tokens in {0: (5, 2), 1: (9, 5)}.items():
        its = [
            replace(m, trajectories=m.trajectories * n)
            for m, n in zip(micro_steps(number, 2), tokens, strict=True)
        ]
        queue.core.add_group(group_name(number), 0, 4, tuple(its))
    leases = [queue.lease(cell) for cell in range(4)]
    assert [x.micro_step.id for x in leases] == ["0.g000001.0", "0.g000000.0", "0.g000001.1", "0.g000000.1"]


def test_only_the_current_step_is_claimed_from() -> None:
    queue = Queue()
    queue.add(2, 1)
    assert queue.ask(claim(0)) is None
    assert queue.core.state().unclaimed == 0


def test_a_waiting_claim_is_answered_when_a_group_comes() -> None:
    queue = Queue()
    assert queue.ask(claim(1)) is None
    queue.add(0, 1)
    assert [type(a) for _, a in queue.poll()] == [Lease]


def test_a_claim_without_work_is_idle_after_its_patience() -> None:
    queue = Queue()
    queue.ask(claim(1))
    assert queue.later(19.9) == []
    assert queue.core.next_wake(queue.now) == 20.0
    assert queue.later(0.2) == [Idle()]


def test_a_claim_with_old_weights_is_stale_and_one_with_newer_waits_for_the_commit() -> None:
    queue = Queue(replace(CONFIG, first_step=3))
    queue.add(6, 1)
    assert queue.ask(claim(1, version=2)) == Stale(version=3)
    assert queue.ask(claim(1, version=4)) is None


def test_a_satellite_hands_over_at_once_when_the_step_is_sealed() -> None:
    queue = Queue()
    queue.add(0, 1)
    queue.add(1, 0)
    lease = queue.lease(1)
    assert queue.ask(claim(1, holds=(lease.token,))) == HandOver(step=0)


def test_a_satellite_waits_a_little_for_more_work_of_an_unsealed_step() -> None:
    queue = Queue()
    queue.add(0, 1)
    lease = queue.lease(1)
    assert queue.ask(claim(1, holds=(lease.token,))) is None
    assert queue.later(4.9) == []
    assert queue.later(0.2) == [HandOver(step=0)]


def test_a_satellite_that_waits_hands_over_when_the_step_is_sealed_meanwhile() -> None:
    queue = Queue()
    queue.add(0, 1)
    lease = queue.lease(1)
    queue.ask(claim(1, holds=(lease.token,)))
    queue.add(1, 0)
    assert queue.later(0.0) == [HandOver(step=0)]


def test_the_core_hands_over_only_when_the_step_is_sealed() -> None:
    queue = Queue()
    queue.add(0, 1)
    lease = queue.lease(0)
    assert queue.ask(claim(0, holds=(lease.token,))) is None
    assert queue.later(10.0) == []
    queue.add(1, 0)
    assert queue.later(0.0) == [HandOver(step=0)]


def test_a_step_is_complete_for_the_core_when_all_its_micro_steps_are_accepted() -> None:
    queue = Queue()
    queue.add(0, 1, executions=4)
    queue.add(1, 1, executions=3)
    own, other = queue.lease(0), queue.lease(2)
    assert queue.core.accept(manifest(0, [own]))
    assert queue.ask(claim(0)) is None
    assert queue.ask(claim(1)) is None
    assert queue.core.accept(manifest(2, [other]))
    complete = StepComplete(step=0, executions=7, stats=MicroStepStats(micro_steps=2), cells=(0, 2))
    assert queue.later(0.0) == [complete], "the core alone is told"


def test_a_step_without_micro_steps_is_complete_at_once() -> None:
    queue = Queue()
    queue.add(0, 0)
    queue.add(1, 0, executions=0)
    assert queue.core.state().complete
    assert queue.ask(claim(0)) == StepComplete(step=0, executions=4, stats=MicroStepStats(), cells=())


def test_a_commit_moves_on_and_counts() -> None:
    queue = Queue()
    queue.add(0, 1)
    queue.add(1, 1)
    queue.add(2, 1)
    for cell in (0, 1):
        queue.core.accept(manifest(cell, [queue.lease(cell)]))
    queue.core.commit(0, 1)
    assert queue.lease(0, version=1).micro_step.id == "1.g000002.0"
    assert queue.core.totals.steps == 1
    assert queue.core.totals.micro_steps_by_cell == {0: 1, 1: 1}
    assert queue.core.totals.satellite_micro_steps == 1


def test_a_commit_repeated_changes_nothing_and_a_wrong_one_is_an_error() -> None:
    queue = Queue()
    queue.add(0, 1)
    queue.add(1, 0)
    with pytest.raises(InvalidCommit, match="no accepted contribution"):
        queue.core.commit(0, 1)
    queue.core.accept(manifest(0, [queue.lease(0)]))
    with pytest.raises(InvalidCommit, match="new version is 3"):
        queue.core.commit(0, 3)
    queue.core.commit(0, 1)
    queue.core.commit(0, 1)
    assert queue.core.step == 1
    with pytest.raises(InvalidCommit, match="current step is 1"):
        queue.core.commit(5, 6)


def test_accepting_a_contribution_again_answers_the_same_and_counts_once() -> None:
    queue = Queue()
    queue.add(0, 1)
    queue.add(1, 0)
    contribution = manifest(1, [queue.lease(1)])
    assert queue.core.accept(contribution)
    assert queue.core.accept(contribution)
    answer = queue.ask(claim(0))
    assert isinstance(answer, StepComplete) and answer.stats.micro_steps == 1


@pytest.mark.parametrize(
    "change",
    [
        {"step": 1},
        {"version": 1},
        {"incarnation": 2},
        {"cell": 2},
        {"micro_steps": ("0.g000000.1", "0.g000000.0")},
        {"micro_steps": ("0.g000000.0",)},
        {"tokens": (1, 1)},
        {"tokens": (1, 2, 3)},
        {"tokens": (), "micro_steps": ()},
    ],
)
def test_a_contribution_that_does_not_match_its_leases_is_refused(change: dict[str, object]) -> None:
    queue = Queue()
    queue.add(0, 2)
    first = queue.lease(1)
    second = queue.lease(1, holds=(first.token,))
    assert not queue.core.accept(replace(manifest(1, [first, second]), **change))
    assert queue.core.verdict(manifest(1, [first, second])) in ("new", "refused")
    assert not queue.core.state().complete


def test_a_refused_contribution_forfeits_all_its_leases() -> None:
    queue = Queue()
    queue.add(0, 2)
    first = queue.lease(1)
    second = queue.lease(1, holds=(first.token,))
    queue.core.return_lease(1, 1, first.token)
    assert not queue.core.accept(manifest(1, [first, second]))
    assert queue.core.state().unclaimed == 2


def test_a_zombie_cannot_forfeit_what_others_hold() -> None:
    queue = Queue()
    queue.add(0, 1)
    old = queue.lease(1)
    queue.core.cell_gone(1, 1)
    new = queue.lease(1, incarnation=2)
    assert new.micro_step == old.micro_step
    assert not queue.core.accept(manifest(1, [old]))
    assert not queue.core.accept(manifest(1, [new], incarnation=1))
    assert queue.core.accept(manifest(1, [new], incarnation=2))


def test_silence_forfeits_all_that_a_life_holds_and_its_late_contribution() -> None:
    queue = Queue()
    queue.add(0, 2)
    first = queue.lease(1)
    queue.now = 60.0
    second = queue.lease(1, holds=(first.token,))
    queue.later(99.0)
    assert queue.core.state().unclaimed == 0, "a claim renews what it names"
    queue.later(2.0)
    assert queue.core.state().unclaimed == 2
    assert not queue.core.accept(manifest(1, [first, second]))


def test_a_lease_whose_answer_was_lost_expires_though_its_cell_goes_on_claiming() -> None:
    queue = Queue()
    queue.add(0, 1)
    queue.lease(1)
    for _ in range(9):
        queue.ask(claim(1))
        assert queue.later(11.0) == []
    queue.ask(claim(1))
    assert [type(answer) for answer in queue.later(2.0)] == [Lease]


def test_a_life_whose_claim_waits_here_is_not_silent() -> None:
    queue = Queue(replace(CONFIG, lease_s=1.0, hand_over_patience_s=100.0))
    queue.add(0, 1)
    lease = queue.lease(1)
    queue.ask(claim(1, holds=(lease.token,)))
    queue.later(19.0)
    assert queue.core.accept(manifest(1, [lease]))


def test_a_cell_that_holds_what_was_forfeit_is_told_to_hand_over_rather_than_given_more() -> None:
    queue = Queue()
    queue.add(0, 2)
    lease = queue.lease(1)
    queue.later(200.0)
    assert queue.ask(claim(1, holds=(lease.token,))) == HandOver(step=0)
    assert not queue.core.accept(manifest(1, [lease]))
    assert queue.lease(1).micro_step == lease.micro_step


def test_a_returned_lease_is_ready_again() -> None:
    queue = Queue()
    queue.add(0, 1)
    lease = queue.lease(1)
    queue.core.return_lease(2, 1, lease.token)
    assert queue.core.state().unclaimed == 0, "it is not that cell's"
    queue.core.return_lease(1, 1, lease.token)
    assert queue.core.state().unclaimed == 1


def test_a_dead_satellite_loses_its_claims_and_keeps_its_contributions() -> None:
    queue = Queue()
    queue.add(0, 2)
    contributed = queue.lease(1)
    assert queue.core.accept(manifest(1, [contributed]))
    lost = queue.lease(1)
    assert queue.core.cell_gone(1, 1) == 1
    assert queue.core.cell_gone(1, 1) == 0
    assert queue.lease(2).micro_step == lost.micro_step
    assert queue.ask(claim(2)) is None


def test_a_dead_core_takes_the_sum_with_it() -> None:
    queue = Queue()
    queue.add(0, 2)
    first, second = queue.lease(0), queue.lease(1)
    queue.core.accept(manifest(0, [first]))
    queue.core.accept(manifest(1, [second]))
    assert queue.core.cell_gone(0, 1) == 2
    assert queue.core.state().unclaimed == 2


def test_a_dead_life_is_granted_nothing() -> None:
    queue = Queue()
    queue.core.cell_gone(1, 1)
    queue.add(0, 1)
    assert queue.ask(claim(1)) is None
    assert queue.later(20.0) == [Idle()]


def test_a_leaving_cell_gets_its_waiting_claim_back() -> None:
    queue = Queue()
    queue.ask(claim(1))
    queue.ask(claim(2))
    queue.core.stop_claiming(1, 1)
    queue.add(0, 1)
    assert sorted(type(a).__name__ for _, a in queue.poll()) == ["Idle", "Lease"]


def test_a_second_claim_of_a_life_supersedes_the_first() -> None:
    queue = Queue()
    queue.core.claim(100, claim(1), 0.0)
    queue.core.claim(101, claim(1), 0.0)
    queue.add(0, 1)
    answers = dict(queue.poll())
    assert answers[100] == Idle()
    assert isinstance(answers[101], Lease)


def test_a_withdrawn_claim_is_granted_nothing() -> None:
    queue = Queue()
    queue.core.claim(100, claim(1), 0.0)
    queue.core.withdraw(100)
    queue.add(0, 1)
    assert queue.poll() == []
    assert queue.core.state().unclaimed == 1


def test_adding_a_group_again_or_after_its_step_changes_nothing() -> None:
    queue = Queue()
    queue.add(0, 1)
    queue.add(0, 1)
    queue.add(1, 0)
    assert queue.core.state().uncommitted == 1
    queue.core.accept(manifest(0, [queue.lease(0)]))
    queue.core.commit(0, 1)
    queue.add(0, 1)
    assert queue.core.state().uncommitted == 0


def test_a_group_of_a_wrong_name_or_step_is_an_error() -> None:
    queue = Queue()
    with pytest.raises(InvalidGroup, match="g000012"):
        queue.core.add_group("x1", 0, 1, ())
    with pytest.raises(InvalidGroup, match="step is 1, must be 0"):
        queue.core.add_group("g000001", 1, 1, ())
    with pytest.raises(InvalidGroup, match="another group"):
        queue.core.add_group("g000001", 0, 1, micro_steps(0, 1))
