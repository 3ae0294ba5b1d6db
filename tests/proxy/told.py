"""A streamed answer without a proxy."""

from __future__ import annotations

from collections.abc import Iterator

from gyre.proxy.api import Api, deltas
from gyre.proxy.conversation import CallRequest, Completion


def told(api: Api, request: CallRequest, completion: Completion) -> list[bytes]:
    """The events of an answer that is complete."""

    def events() -> Iterator[bytes]:
        stream = api.stream(request)
        yield from stream.begin(completion)
        for piece in deltas(completion.message.reasoning or ""):
            yield from stream.say("reasoning", piece)
        for piece in deltas(completion.message.text):
            yield from stream.say("text", piece)
        yield from stream.end(completion)

    return list(events())
