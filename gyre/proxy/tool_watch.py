"""Whether a policy's tool calls are read at all: where none is, it has another format than the job says."""

from __future__ import annotations

import structlog

from gyre.proxy.codec import DecodedAnswer
from gyre.proxy.conversation import CallRequest
from gyre.proxy.tool_formats import looks_like

log = structlog.get_logger()

# So many answers without a call say that there will be none; a policy that learns has some by chance.
ALARM_CALLS = 64
_SHOWN_CHARACTERS = 200


class ToolWatch:
    """Of all calls of a proxy's life. Silent as soon as one tool call was read."""

    def __init__(self, tool_format: str) -> None:
        self._tool_format = tool_format
        self._offered = 0
        self._malformed = 0
        self._over = False

    def answered(self, call: str, request: CallRequest, answer: DecodedAnswer) -> None:
        """An answer was recorded."""
        text = answer.message.text
        if answer.malformed:
            raw = "".join(answer.raw_calls.values()) or text
            log.warning("malformed_tool_call", call=call, text=raw[:_SHOWN_CHARACTERS])
        if self._over or not request.parse_tools:
            return
        self._offered += 1
        self._malformed += answer.malformed
        self._over = answer.parsed > 0
        if not self._over and self._offered == ALARM_CALLS:
            self._over = True
            log.error(
                "no_tool_call_parsed",
                answers=self._offered,
                malformed=self._malformed,
                tool_format=self._tool_format,
                looks_like=looks_like(text, request.conversation.tools),
                text=text[:_SHOWN_CHARACTERS],
                fix="set harness.proxy.tool_format to the way in which this policy writes tool calls",
            )
