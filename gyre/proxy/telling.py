"""An answer as it is told while it is sampled: nothing twice, and in the end all that it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import structlog

from gyre.proxy.api import EventStream, deltas
from gyre.proxy.conversation import CallError, Completion, Opening
from gyre.proxy.live import LiveAnswer, Part

log = structlog.get_logger()


class Telling:
    """To one client. Whatever is asked of it first begins the stream."""

    def __init__(self, stream: EventStream, live: LiveAnswer) -> None:
        self._stream = stream
        self._live = live
        self._said: dict[Part, list[str]] = {"reasoning": [], "text": []}
        self._begun = False
        self.tokens = 0

    def hear(self, opening: Opening, token_ids: Sequence[int]) -> bytes:
        """Events for those that have come since; `token_ids` are all so far."""
        events = list(self._begin(opening))
        fresh = token_ids[self.tokens :]
        self.tokens += len(fresh)
        for part, text in self._live.hear(fresh):
            events += self._say(part, text)
        return b"".join(events)

    def end(self, completion: Completion) -> bytes:
        """Events for what was not told yet, the last one included."""
        message = completion.message
        events = list(self._begin(completion))
        events += self._complete(completion.call, "reasoning", message.reasoning or "")
        events += self._complete(completion.call, "text", message.text)
        events += self._stream.end(completion)
        return b"".join(events)

    def error(self, error: CallError) -> bytes:
        """The event that ends the stream."""
        return self._stream.error(error)

    def _begin(self, opening: Opening) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield from self._stream.begin(opening)

    def _say(self, part: Part, text: str) -> Iterator[bytes]:
        self._said[part].append(text)
        for piece in deltas(text):
            yield from self._stream.say(part, piece)

    def _complete(self, call: str, part: Part, text: str) -> Iterator[bytes]:
        said = "".join(self._said[part])
        if not text.startswith(said):
            # A decoder that takes back what it wrote; the record has the tokens.
            log.error("streamed_otherwise", call=call, part=part, streamed=said[-80:])
        yield from self._say(part, text[len(said) :])
