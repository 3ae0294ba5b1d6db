"""A cell that goes from state to state of a role change when the test lets it."""

from __future__ import annotations

from gyre.actors import Ask
from gyre.cell.actor import CellActor
from gyre.cell.messages import RoleState


class Passed(Ask[None], frozen=True, kw_only=True):
    """To whom the cell tells its states. The next one begins when it is answered."""

    state: RoleState


class HeldCell(CellActor):
    async def _tell_state(self, state: RoleState) -> None:
        await super()._tell_state(state)
        if state.change:
            await self._config.waterlevel.ask(Passed(state=state), timeout_s=60.0)
