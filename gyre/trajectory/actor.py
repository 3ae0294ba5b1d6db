"""The TrajectoryActor: calls become trees, complete groups become micro-steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import structlog

from gyre.actors import Actor, Ref, Tell, handles
from gyre.schedule.messages import EvalDone, GroupFinished
from gyre.trajectory.book import Book, ExecutionError, Group, group_number, mean
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.journal import Journal
from gyre.trajectory.ledger import Ledger
from gyre.trajectory.messages import (
    AddGroup,
    GetCalls,
    GetResume,
    GetTotals,
    ResumeState,
    SetWaterlevel,
    Totals,
)
from gyre.trajectory.pack import PlannedGroup, plan_group
from gyre.trajectory.reader import JournalReader
from gyre.trajectory.records import (
    CallRecord,
    CallRetried,
    ExecutionEnded,
    ExecutionOpened,
    RecordCall,
    RecordSampled,
)
from gyre.trajectory.resume import load
from gyre.trajectory.rows import EndedExecution, GroupOutcome, Undelivered

log = structlog.get_logger()

# The queue answers when it has journalled, and a full disk can make that long.
ADD_GROUP_S = 24 * 3600.0


class TrajectoryActorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A micro-step has `micro_step_tokens` for each of the `ranks` of a cell. `first_step` is the first step
    that is not trained yet."""

    sampling: SamplingConfig
    group_size: int
    groups_per_step: int
    micro_step_tokens: int
    ranks: int = 1
    first_step: int = 0


class TrajectoryActor(Actor):
    """State: the book of executions and groups. It starts from what the journal holds, so that a restart
    and a resumed job are the same thing."""

    def __init__(self, config: TrajectoryActorConfig, journal: Journal, queue: Ref) -> None:
        self._config = config
        self._journal = journal
        self._queue = queue
        self._waterlevel: Ref | None = None
        self._untold: list[Tell] = []
        self._book = Book()

    async def started(self) -> None:
        with JournalReader(self._journal.path) as reader:
            self._book, complete = load(reader, self._config.first_step, self._config.groups_per_step)
        for group in complete:
            self.context.run(self._finish(group), name=f"finish {group.id}")

    def summary(self) -> Mapping[str, Any]:
        return self._book.counts()

    @handles(ExecutionOpened, concurrent=True)
    async def opened(self, message: ExecutionOpened) -> None:
        spec = message.spec
        if spec.split == "train" and spec.group_executions != self._config.group_size:
            raise ExecutionError(
                spec.execution,
                f"its group has {spec.group_executions} executions, the job's have {self._config.group_size}",
            )
        self._book.open(spec)
        await self._journal.write(spec)

    @handles(RecordCall, concurrent=True)
    async def record(self, message: RecordCall) -> None:
        self._book.record(message.record)
        await self._journal.write(message.record)

    @handles(RecordSampled, concurrent=True)
    async def sampled(self, message: RecordSampled) -> None:
        if tokens := self._book.sampled(message):
            await self._journal.write(Undelivered(execution=message.execution, tokens=tokens))

    @handles(GetCalls)
    async def calls(self, message: GetCalls) -> AsyncIterator[CallRecord]:
        await self._journal.write()  # what is on its way there is durable before this is
        for record in await asyncio.to_thread(self._read_calls, message.execution):
            yield record

    @handles(CallRetried, concurrent=True)
    async def retried(self, message: CallRetried) -> None:
        if self._book.retried(message.execution):
            await self._journal.write(message)

    @handles(ExecutionEnded, concurrent=True)
    async def ended(self, message: ExecutionEnded) -> None:
        ended = self._book.end(message.spec, message.result)
        # Whoever asked may give up on a full disk; the end counts all the same.
        await asyncio.shield(self.context.run(self._close(ended), name=f"end {message.spec.execution}"))

    @handles(SetWaterlevel)
    async def set_waterlevel(self, message: SetWaterlevel) -> None:
        self._waterlevel = message.ref
        untold, self._untold = self._untold, []
        for told in untold:
            await message.ref.tell(told)

    @handles(GetTotals)
    async def totals(self, message: GetTotals) -> Totals:
        return self._book.totals()

    @handles(GetResume)
    async def resume(self, message: GetResume) -> ResumeState:
        return self._book.resume_state()

    def _read_calls(self, execution: str) -> list[CallRecord]:
        with JournalReader(self._journal.path) as reader:
            return reader.calls(execution)

    async def _close(self, ended: EndedExecution) -> None:
        await self._journal.write(ended)
        if not self._book.close(ended):
            return
        _log_execution(ended)
        group = self._book.group(ended.spec.group)
        if group.complete:
            self.context.run(self._finish(group), name=f"finish {group.id}")

    async def _finish(self, group: Group) -> None:
        if group.first.split == "eval":
            await self._finish_eval(group)
        else:
            await self._finish_train(group)

    async def _finish_train(self, group: Group) -> None:
        step = group_number(group.id) // self._config.groups_per_step
        # It may take seconds of a loop that all calls share; nobody changes a complete group meanwhile.
        planned = await asyncio.to_thread(
            plan_group,
            group.id,
            step,
            tuple(group.scored.values()),
            self._config.sampling,
            self._config.micro_step_tokens,
            self._config.ranks,
        )
        outcome = await self._note(group, step, planned)
        await self._queue.ask(
            AddGroup(
                group=group.id, step=step, executions=planned.executions, micro_steps=planned.micro_steps
            ),
            timeout_s=ADD_GROUP_S,
        )
        _log_group(outcome, group, len(group.ended) - len(planned.scores), len(planned.micro_steps))
        await self._tell(GroupFinished(group=group.id))

    async def _finish_eval(self, group: Group) -> None:
        first, scores = group.first, list(group.scores.values())
        await self._note(group, first.step)
        log.info(
            "eval",
            group=group.id,
            step=first.step,
            version=first.version_dispatched,
            score=mean(scores) if scores else None,
            executions=len(scores),
            dropped=len(group.ended) - len(scores),
        )
        await self._tell(
            EvalDone(
                step=first.step,
                version=first.version_dispatched,
                score=mean(scores) if scores else float("nan"),
                executions=len(scores),
            )
        )

    async def _note(self, group: Group, step: int, planned: PlannedGroup | None = None) -> GroupOutcome:
        ledger = planned.ledger if planned else Ledger()
        outcome = GroupOutcome(
            group=group.id,
            split=group.first.split,
            step=step,
            version=group.first.version_dispatched,
            scores=group.scores,
            advantages=planned.advantages if planned else {},
            discarded=planned.discarded if planned else False,
            trained_tokens=ledger.trained_tokens,
            excluded_tokens=group.excluded_tokens(ledger),
        )
        await self._journal.write(outcome)
        self._book.finish(outcome)
        return outcome

    async def _tell(self, message: Tell) -> None:
        if self._waterlevel is None:
            self._untold.append(message)
        else:
            await self._waterlevel.tell(message)


def _log_execution(ended: EndedExecution) -> None:
    spec, result, counts = ended.spec, ended.result, ended.counts
    log.info(
        "execution_finished",
        execution=spec.execution,
        group=spec.group,
        task=spec.task,
        split=spec.split,
        attempt=spec.attempt,
        reason=result.reason,
        score=result.score,
        seconds=round(result.seconds, 3),
        tokens=counts.sampled_tokens,
        calls=counts.calls,
        turns=counts.turns,
        roles=counts.roles,
        compactions=counts.compactions,
        sub_agents=counts.sub_agents,
        retries=counts.retries,
        tool_calls=counts.tool_calls,
        malformed_tool_calls=counts.malformed_tool_calls,
        detail=result.detail,
    )
    if counts.malformed_tool_calls and not counts.tool_calls:
        log.warning(
            "execution_without_tool_call", execution=spec.execution, malformed=counts.malformed_tool_calls
        )


def _log_group(outcome: GroupOutcome, group: Group, dropped: int, micro_steps: int) -> None:
    if outcome.discarded:
        log.warning(
            "group_discarded",
            group=outcome.group,
            step=outcome.step,
            scored=len(outcome.scores),
            dropped=dropped,
            excluded_tokens=outcome.excluded_tokens,
        )
        return
    log.info(
        "group",
        group=outcome.group,
        step=outcome.step,
        scores=outcome.scores,
        advantages=outcome.advantages,
        dropped=dropped,
        micro_steps=micro_steps,
        without_signal=outcome.without_signal,
        trained_tokens=outcome.trained_tokens,
        excluded_tokens=outcome.excluded_tokens,
        tool_calls=sum(ended.counts.tool_calls for ended in group.ended.values()),
        malformed_tool_calls=sum(ended.counts.malformed_tool_calls for ended in group.ended.values()),
    )
