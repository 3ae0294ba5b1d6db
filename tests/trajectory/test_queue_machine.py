"""No micro-step is lost or counted twice, whatever order of claims, expiries, deaths and late messages."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre.cell.messages import HandOver, Idle, Lease, Manifest, Stale, StepComplete
from gyre.trajectory.queue import Answer, QueueConfig, QueueCore
from tests.trajectory.queue_parts import GROUPS_PER_STEP, claim, group_name, manifest, micro_steps

CELLS = 3
STEPS = 3
CONFIG = QueueConfig(groups_per_step=GROUPS_PER_STEP, lease_s=40.0, patience_s=10.0, hand_over_patience_s=3.0)
CELL = st.integers(0, CELLS - 1)


class Cell:
    """What a cell knows: its weights, what it has computed, whether it waits for an answer."""

    def __init__(self, number: int, incarnation: int) -> None:
        self.number = number
        self.incarnation = incarnation
        self.version = 0
        self.held: list[Lease] = []
        self.waiting: int | None = None
        self.handing_over = False
        self.gone = False

    @property
    def is_free(self) -> bool:
        return not self.gone and not self.handing_over and self.waiting is None


class QueueMachine(RuleBasedStateMachine):
    """The core's sum is the judge: what was added to it when the step is committed must be the step."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = QueueCore(CONFIG)
        self.now = 0.0
        self.key = 0
        self.cells = {n: Cell(n, 1) for n in range(CELLS)}
        self.on_the_way: list[tuple[Cell, Manifest]] = []
        self.sum: list[str] = []
        self.counts: dict[int, int] = {}

    # --- the world ---

    @rule(number=st.integers(0, STEPS * GROUPS_PER_STEP - 1), count=st.integers(0, 3))
    def add_group(self, number: int, count: int) -> None:
        count = self.counts.setdefault(number, count)
        self.queue.add_group(group_name(number), number // GROUPS_PER_STEP, 4, micro_steps(number, count))
        self.deliver()

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 45.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.queue.expire(self.now)
        self.deliver()

    # --- cells ---

    @rule(number=CELL)
    def claim(self, number: int) -> None:
        cell = self.cells[number]
        if not cell.is_free:
            return
        self.key += 1
        cell.waiting = self.key
        holds = tuple(lease.token for lease in cell.held)
        message = claim(number, incarnation=cell.incarnation, version=cell.version, holds=holds)
        self.queue.claim(self.key, message, self.now)
        self.deliver()

    @rule(number=CELL)
    def leave(self, number: int) -> None:
        """A cell leaves training early and hands over what it has."""
        cell = self.cells[number]
        self.queue.stop_claiming(number, cell.incarnation)
        self.deliver()
        self.hand_over(cell)

    @rule(number=CELL)
    def return_last(self, number: int) -> None:
        cell = self.cells[number]
        if cell.is_free and cell.held:
            self.queue.return_lease(number, cell.incarnation, cell.held.pop().token)
            self.deliver()

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data(), repeat=st.booleans())
    def arrive(self, data: st.DataObject, repeat: bool) -> None:
        """The core has staged a contribution, asks the queue, and adds it. The ask may be repeated."""
        index = data.draw(st.integers(0, len(self.on_the_way) - 1))
        sender, contribution = self.on_the_way.pop(index)
        counts = self.queue.accept(contribution)
        if repeat:
            assert self.queue.accept(contribution) is counts
        if counts:
            self.sum += contribution.micro_steps
        sender.held, sender.handing_over = [], False
        self.deliver()

    @rule(number=CELL)
    def die(self, number: int) -> None:
        """Its contribution may be on the way (a zombie's, if it was only taken for dead), unless the core
        dies, to which they are. A new life begins."""
        old = self.cells[number]
        old.gone = True
        if number == 0:
            self.sum = []
            for sender, _ in self.on_the_way:
                sender.held, sender.handing_over = [], False
            self.on_the_way.clear()
        self.queue.cell_gone(number, old.incarnation)
        self.cells[number] = Cell(number, old.incarnation + 1)
        self.cells[number].version = self.queue.step
        self.deliver()

    # --- answers ---

    def deliver(self) -> None:
        while answers := self.queue.poll(self.now):
            for key, answer in answers:
                for cell in self.cells.values():
                    if cell.waiting == key:
                        cell.waiting = None
                        self.act(cell, answer)

    def act(self, cell: Cell, answer: Answer) -> None:
        match answer:
            case Lease():
                assert answer.version == cell.version == answer.micro_step.step == self.queue.step
                assert answer.micro_step.id not in self.sum
                cell.held.append(answer)
            case HandOver():
                assert cell.held
                self.hand_over(cell)
            case Stale():
                cell.held, cell.version = [], answer.version
            case StepComplete():
                assert cell.number == 0
                self.commit(answer)
                cell.version = answer.step + 1
            case Idle():
                pass

    def hand_over(self, cell: Cell) -> None:
        if cell.held and not cell.handing_over:
            cell.handing_over = True
            contribution = manifest(
                cell.number, cell.held, incarnation=cell.incarnation, step=cell.held[0].micro_step.step
            )
            self.on_the_way.append((cell, contribution))

    def commit(self, complete: StepComplete) -> None:
        numbers = range(complete.step * GROUPS_PER_STEP, (complete.step + 1) * GROUPS_PER_STEP)
        planned = [m.id for number in numbers for m in micro_steps(number, self.counts[number])]
        assert sorted(self.sum) == sorted(planned)
        assert complete.stats.micro_steps == len(planned)
        assert complete.executions == 4 * GROUPS_PER_STEP
        self.sum = []
        self.queue.commit(complete.step, complete.step + 1)

    # --- always ---

    @invariant()
    def no_micro_step_is_in_the_sum_twice(self) -> None:
        assert len(set(self.sum)) == len(self.sum)

    def teardown(self) -> None:
        """From wherever it is, it ends."""
        for number in range(STEPS * GROUPS_PER_STEP):
            self.add_group(number, 1)
        for _ in range(200):
            if self.queue.step >= STEPS:
                break
            for number in range(CELLS):
                self.claim(number)
            for sender, contribution in self.on_the_way:
                if self.queue.accept(contribution):
                    self.sum += contribution.micro_steps
                sender.held, sender.handing_over = [], False
            self.on_the_way.clear()
            self.wait(4.0)
        assert self.queue.step == STEPS
        assert sum(self.queue.totals.micro_steps_by_cell.values()) == sum(self.counts.values())


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestQueue = QueueMachine.TestCase
