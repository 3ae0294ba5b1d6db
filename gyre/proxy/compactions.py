"""How often an execution may have its context summarised: some harnesses never stop by themselves."""

from __future__ import annotations

import structlog

from gyre.proxy.conversation import CallError, Conversation
from gyre.proxy.messages import CompactionLimit

log = structlog.get_logger()


class Compactions:
    """Of one execution. Without a limit nothing is counted."""

    def __init__(self, execution: str, limit: CompactionLimit | None) -> None:
        self._execution = execution
        self._limit = limit
        self._done = 0
        self._is_over = False

    def admit(self, conversation: Conversation) -> None:
        """Raises CallError for the summary that is one too many, and for every call after it: of a refused
        summary alone a harness goes on with what it has."""
        if self._limit is None:
            return
        if not self._is_over and self._done >= self._limit.most and self._summarises(conversation):
            self._is_over = True
            log.warning("too_many_compactions", execution=self._execution, compactions=self._done)
        if self._is_over:
            message = f"this execution has compacted its context {self._done} times, and may not any more"
            raise CallError(400, message, code="too_many_compactions")

    def recorded(self, conversation: Conversation) -> None:
        """A call was answered."""
        if self._limit is not None and self._summarises(conversation):
            self._done += 1

    def _summarises(self, conversation: Conversation) -> bool:
        assert self._limit is not None
        first, last = conversation.messages[:1], conversation.messages[-1:]
        asks = [message.text for message in first if message.role == "system"]
        asks += [message.text for message in last if message.role == "user"]
        return any(word in text for text in asks for word in self._limit.words)
