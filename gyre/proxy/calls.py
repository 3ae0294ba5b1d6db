"""The calls of open executions: from a request to its recorded answer, told from its repetitions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from gyre.actors import Ref
from gyre.actors.errors import ActorError
from gyre.cell.engine.base import GenerateRequest, SamplingParams
from gyre.proxy.codec import Codec, DecodedAnswer
from gyre.proxy.conversation import (
    AnswerReason,
    CallError,
    CallRequest,
    Completion,
    Message,
    Opening,
    bad_request,
    execution_closed,
    internal,
    prompt_too_long,
    unavailable,
)
from gyre.proxy.executions import Execution, Flight
from gyre.proxy.live import LiveAnswer
from gyre.proxy.matching import draw_seed
from gyre.proxy.messages import OpenExecution, ProxyTotals
from gyre.proxy.prompts import Prompt, encode_prompt
from gyre.proxy.recent import WarmPaths
from gyre.proxy.records import call_record
from gyre.proxy.routes import Routes, Sample
from gyre.proxy.settling import settle
from gyre.proxy.tool_watch import ToolWatch
from gyre.trajectory.records import UNFINISHED, CallRecord, CallRetried, RecordCall

log = structlog.get_logger()

_CLOSED_KEYS = 65_536
# The journal answers when it has written, and a full disk can make that long.
_RECORD_S = 24 * 3600.0
# How long a call may take to end once it is cancelled.
_CANCEL_S = 5.0


class RunTask(Protocol):
    """`ActorContext.run`."""

    def __call__(self, coroutine: Coroutine[Any, Any, None], /, *, name: str) -> asyncio.Task[None]: ...


class CallDesk:
    """Executions by key; answers their calls. `sampling` is the job's: its seed is the job's seed, its
    `max_new_tokens` bounds every answer."""

    def __init__(
        self,
        *,
        codec: Codec,
        routes: Routes,
        trajectory: Ref,
        run: RunTask,
        sampling: SamplingParams,
        window_tokens: int,
        model_name: str,
        delivered: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._codec = codec
        self._routes = routes
        self._trajectory = trajectory
        self._run = run
        self._sampling = msgspec.structs.replace(sampling, stop_token_ids=codec.stop_token_ids)
        self._window_tokens = window_tokens
        self.model_name = model_name
        self._delivered = delivered
        self._by_key: dict[str, Execution] = {}
        self._by_name: dict[str, Execution] = {}
        self._closed_keys: deque[str] = deque(maxlen=_CLOSED_KEYS)
        self._sums: Counter[str] = Counter()
        self._warm = WarmPaths()
        self._tools = ToolWatch(codec.tool_format)
        self._came_or_went = asyncio.Event()

    def open(self, opening: OpenExecution) -> Execution:
        """Its key is that of `opening`, or a new one."""
        name = opening.execution
        self._shut(name)
        key = opening.key or f"gyre-{secrets.token_urlsafe(24)}"
        execution = Execution(name, opening.attempt, key, opening.refill, opening.compactions, self._warm)
        self._by_name[name] = self._by_key[execution.key] = execution
        return execution

    def close_keys(self, keys: Iterable[str]) -> None:
        """They were those of executions that have ended."""
        self._closed_keys.extend(keys)

    async def close(self, name: str) -> None:
        """The key dies; what is in flight is cancelled, and what was sampled for it recorded."""
        execution = self._by_name.get(name)
        flights = self._shut(name)
        if tasks := [flight.task for flight in flights if flight.task is not None]:
            await asyncio.wait(tasks, timeout=_CANCEL_S)
        for flight in flights:
            await self._keep_unfinished(flight)
        engines = self._routes.visited(name)
        if execution is None or execution.lived_before:
            engines = self._routes.engines
        await settle(name, engines, self._trajectory, _RECORD_S)

    def _shut(self, name: str) -> list[Flight]:
        """Answers what was in flight."""
        execution = self._by_name.pop(name, None)
        if execution is None:
            return []
        execution.closed = True
        del self._by_key[execution.key]
        self._closed_keys.append(execution.key)
        self._routes.forget_session(name)
        flights = execution.flights
        for flight in flights:
            flight.fail(execution_closed())
            if flight.task is not None:
                flight.task.cancel()
        return flights

    async def _keep_unfinished(self, flight: Flight) -> None:
        """Nobody is answered, but no token that was sampled is lost sight of."""
        if flight.unfinished is None:
            return
        try:
            await self._trajectory.ask(RecordCall(record=flight.unfinished), timeout_s=_RECORD_S)
        except ActorError as error:
            log.warning("unfinished_call_not_recorded", call=flight.call, reason=str(error))
        flight.unfinished = None

    def identify(self, key: str | None) -> Execution:
        """Whose key it is. Raises CallError."""
        execution = self._by_key.get(key or "")
        if execution is not None:
            return execution
        if key in self._closed_keys:
            raise execution_closed()
        raise CallError(401, "no open execution has this API key", code="invalid_api_key")

    async def admit(self, execution: Execution, request: CallRequest) -> Flight:
        """The call that answers this request: a new one, or the one that it repeats."""
        digests = _digests(execution, request)
        flight = await execution.find_repeated(request, digests)
        if execution.closed:
            raise execution_closed()
        if flight is not None:
            flight.repeated = True
            return flight
        execution.compactions.admit(request.conversation)
        flight = execution.begin(request, digests)
        self._count_in_flight(1)
        flight.task = self._run(self._fly(execution, flight), name=f"call {flight.call}")
        flight.task.add_done_callback(lambda _: self._landed(flight))
        return flight

    def live(self, request: CallRequest) -> LiveAnswer:
        """For telling its answer while that is sampled."""
        return self._codec.live(parse_tools=request.parse_tools)

    def reasoning_tokens(self, output_ids: Sequence[int], answer: Message) -> int:
        """How many of an answer's tokens were thought."""
        return 0 if answer.reasoning is None else self._codec.reasoning_tokens(output_ids)

    async def count_tokens(self, execution: Execution, request: CallRequest) -> int:
        """How long the prompt of such a call would be. Raises CallError."""
        digests = _digests(execution, request)
        prompt = await encode_prompt(self._codec, execution.index, request.conversation, digests)
        return len(prompt.ids)

    async def delivered(self, execution: Execution, flight: Flight) -> None:
        """The answer reached a client."""
        execution.forget(flight)
        await self._delivered(execution.name, flight.call)
        if flight.repeated and not execution.closed:
            self._sums["retries"] += 1
            log.info("call_retried", execution=execution.name, call=flight.call)
            await self._trajectory.tell(CallRetried(execution=execution.name, call=flight.call))

    def answered_with_error(self, error: CallError) -> None:
        """An error left for a client."""
        if error.status >= 500:
            self._sums["failed_calls"] += 1

    def totals(self) -> ProxyTotals:
        names = ProxyTotals.__struct_fields__
        kv = self._routes.kv
        totals = ProxyTotals(**{name: self._sums[name] for name in names})
        return msgspec.structs.replace(
            totals,
            kv_sessions_moved=kv.sessions,
            kv_sessions_recomputed=kv.recomputed.total(),
            kv_sessions_rested=kv.rested,
            kv_bytes_moved=kv.nbytes,
            kv_move_s=kv.seconds,
        )

    async def in_flight(self) -> AsyncGenerator[int, None]:
        """How many calls are, and again whenever that has changed. For one watcher."""
        while True:
            self._came_or_went.clear()
            yield self._sums["in_flight"]
            await self._came_or_went.wait()

    def _count_in_flight(self, change: int) -> None:
        self._sums["in_flight"] += change
        self._came_or_went.set()

    async def _fly(self, execution: Execution, flight: Flight) -> None:
        try:
            completion = await self._complete(execution, flight)
            if not flight.done.done():
                flight.done.set_result(completion)
        except CallError as error:
            log.warning(
                "call_failed",
                execution=execution.name,
                call=flight.call,
                status=error.status,
                reason=error.message,
            )
            await self._keep_unfinished(flight)
            execution.forget(flight)
            flight.fail(error)
        except Exception as error:
            # The call fails, the proxy goes on: others have calls in flight here.
            log.exception("call_failed", execution=execution.name, call=flight.call, status=500)
            await self._keep_unfinished(flight)
            execution.forget(flight)
            flight.fail(internal(error))

    def _landed(self, flight: Flight) -> None:
        """Also called where the flight's task was cancelled before its first step."""
        self._count_in_flight(-1)
        flight.fail(unavailable("the proxy is stopping"))
        # Else it goes when garbage is collected, with its prompt and all that it was asked.
        flight.sample.heard = None

    async def _complete(self, execution: Execution, flight: Flight) -> Completion:
        started_s = time.time()
        request = flight.request
        prompt, seed = await self._encode(execution, flight)
        sample = flight.sample
        flight.prompt = Opening(
            call=flight.call,
            model=request.model or self.model_name,
            created_s=int(started_s),
            prompt_tokens=len(prompt.ids),
        )

        def decoded() -> tuple[DecodedAnswer, CallRecord]:
            answer = self._codec.decode_answer(
                sample.token_ids,
                flight.call,
                parse_tools=request.parse_tools,
                tools=request.conversation.tools,
            )
            return answer, call_record(execution.name, flight, prompt, sample, answer, started_s)

        try:
            await self._routes.sample(self._generate_request(execution, flight, prompt, seed), sample)
        except BaseException:
            if sample.token_ids:
                flight.unfinished = msgspec.structs.replace(decoded()[1], finish_reason=UNFINISHED)
            raise
        answer, record = decoded()
        try:
            await self._trajectory.ask(RecordCall(record=record), timeout_s=_RECORD_S)
        except ActorError as error:
            raise unavailable(f"the call could not be recorded: {error}") from error
        execution.compactions.recorded(request.conversation)
        execution.index.add(
            flight.call,
            parent=prompt.parent,
            digest=flight.digests[-1],
            answer=answer.message,
            new_input_ids=prompt.new_ids,
            output_ids=sample.token_ids,
        )
        self._warm.keep(flight.call, prompt.parent, prompt.ids, sample.token_ids)
        self._count(flight, prompt, sample, answer)
        return Completion(
            **msgspec.structs.asdict(flight.opening),
            message=answer.message,
            finish_reason=finish_reason(sample.finish_reason, answer.message),
            completion_tokens=len(sample.token_ids),
            reasoning_tokens=answer.reasoning_tokens,
        )

    async def _encode(self, execution: Execution, flight: Flight) -> tuple[Prompt, int]:
        prompt = await encode_prompt(
            self._codec, execution.index, flight.request.conversation, flight.digests
        )
        if len(prompt.ids) >= self._window_tokens:
            raise prompt_too_long(len(prompt.ids), self._window_tokens)
        digest = execution.index.prompt_digest(prompt.parent, prompt.new_ids)
        seed = draw_seed(
            self._sampling.seed, execution.name, digest, execution.prompts[digest], execution.refill
        )
        execution.prompts[digest] += 1
        return prompt, seed

    def _generate_request(
        self, execution: Execution, flight: Flight, prompt: Prompt, seed: int
    ) -> GenerateRequest:
        left = self._window_tokens - len(prompt.ids)
        asked = flight.request.max_tokens or left
        limit = min(asked, left, self._sampling.max_new_tokens)
        return GenerateRequest(
            call=flight.call,
            session=execution.name,
            prompt_ids=prompt.ids,
            prompt_tokens=len(prompt.ids),
            sampling=msgspec.structs.replace(self._sampling, seed=seed, max_new_tokens=limit),
        )

    def _count(self, flight: Flight, prompt: Prompt, sample: Sample, answer: DecodedAnswer) -> None:
        self._sums.update(
            calls=1,
            reroutes=sample.reroutes,
            tool_calls=answer.parsed,
            malformed_tool_calls=answer.malformed,
            prompt_tokens=len(prompt.ids),
            sampled_tokens=len(sample.token_ids),
        )
        log.debug(
            "call_recorded",
            call=flight.call,
            prompt_tokens=len(prompt.ids),
            sampled_tokens=len(sample.token_ids),
            reroutes=sample.reroutes,
        )
        self._tools.answered(flight.call, flight.request, answer)


def _digests(execution: Execution, request: CallRequest) -> list[bytes]:
    try:
        return execution.index.digests(request.conversation)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


def finish_reason(sampled: str, answer: Message) -> AnswerReason:
    """How an answer ended, whose sampling ended so."""
    if sampled == "length":
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"
