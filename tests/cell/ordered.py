"""The job's own WaterlevelActor, whose decisions are the test's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gyre.actors import handles
from gyre.schedule.actor import WaterlevelActor
from gyre.schedule.policy import PolicyConfig
from gyre.schedule.state import ClusterState, Order, ToRollout, ToTrain
from tests.cell.held import Passed


class Decisions:
    """In the place of the policy."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.opposite: ToTrain | ToRollout | None = None

    def decide(self, state: ClusterState, config: PolicyConfig) -> list[Order]:
        orders, self.orders = self.orders, []
        return orders

    def turns_back(self, state: ClusterState, config: PolicyConfig) -> ToTrain | ToRollout | None:
        return self.opposite


class Ordered(WaterlevelActor):
    """Orders what the test does."""

    passed: Callable[[str], Awaitable[None]]

    def look(self) -> None:
        self._changed.set()

    @handles(Passed, concurrent=True)
    async def held(self, message: Passed) -> None:
        await self.passed(message.state.state)
