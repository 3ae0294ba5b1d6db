"""What engines sampled for an execution that takes no more calls: no token of it is lost sight of."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from gyre.actors import Ref
from gyre.actors.errors import ActorDied, ActorError
from gyre.cell.engine import SampledLeg
from gyre.cell.messages import EndSession, ForgetSession
from gyre.trajectory.records import RecordSampled

log = structlog.get_logger()

# Some do the prompts of long calls first.
_ANSWER_S = 120.0


async def settle(execution: str, engines: Collection[Ref], trajectory: Ref, record_s: float) -> None:
    """Tells the TrajectoryActor what they sampled, before they forget it: whatever dies in between, it can be
    asked again."""
    told = await asyncio.gather(*(_end(engine, execution) for engine in engines))
    legs = tuple(leg for found in told for leg in found or ())
    if not legs:
        return
    try:
        await trajectory.ask(RecordSampled(execution=execution, legs=legs), timeout_s=record_s)
    except ActorError as error:
        log.warning("sampled_tokens_not_recorded", execution=execution, reason=str(error))
        return
    if None in told:
        # What the silent one sampled can only be told from what the others did.
        return
    for engine, found in zip(engines, told, strict=True):
        if found:
            await engine.tell(ForgetSession(session=execution))


async def _end(engine: Ref, execution: str) -> tuple[SampledLeg, ...] | None:
    """Its legs, none of one that is dead with what it knew; None where it does not answer."""
    try:
        return await engine.ask(EndSession(session=execution), timeout_s=_ANSWER_S)
    except ActorDied:
        return ()
    except (ActorError, TimeoutError) as error:
        log.warning("sampled_tokens_unknown", execution=execution, engine=str(engine), reason=str(error))
        return None
