"""A sampled answer while it is sampled: of its tokens so far, what its text will say whatever follows.

All that is told of an answer is a beginning of what the complete one says, however its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

from gyre.proxy.reasoning import CLOSE, OPEN

Part = Literal["reasoning", "text"]
# What decoders write for bytes that are no text, or none yet.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# Tokens that are no text yet: from so many on they are looked at ever more rarely.
_MANY = 64


class Piece(NamedTuple):
    """Goes on where the last one of its part ended."""

    part: Part
    text: str


class Certain(NamedTuple):
    """The first `characters` of a text that goes on are content whatever follows. `ends`: no more will be
    certain before the text is complete, because a tool call may begin there."""

    characters: int
    ends: bool


class LiveText:
    """Ids as text. A character whose bytes have not all come is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: Collection[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        # A decoder may write a token otherwise where none is before it.
        self._context: list[int] = []
        self._fresh: list[int] = []
        self._shown = 0
        self._due = 0

    def hear(self, ids: Sequence[int]) -> str:
        """The text that they add for certain."""
        self._fresh += [token for token in ids if token not in self._hidden]
        if not self._fresh or len(self._fresh) < self._due:
            return ""
        text = self._decode([*self._context, *self._fresh])
        certain = text.rstrip(_UNKNOWN)
        new, self._shown = certain[self._shown :], max(self._shown, len(certain))
        if len(certain) == len(text):
            self._context, self._fresh, self._due = self._fresh, [], 0
            self._shown = len(self._decode(self._context))
        elif len(self._fresh) > _MANY:
            self._due = len(self._fresh) * 3 // 2
        return new


class LiveAnswer:
    """Reasoning and content of an answer, as `split_reasoning` and a tool format see the complete one.
    `opened`: the prompt ended with the opening tag. `certain` says it of content, with
    whether some was told before; None where all is."""

    def __init__(
        self, text: LiveText, *, opened: bool, certain: Callable[[str, bool], Certain] | None
    ) -> None:
        self._text = text
        self._opened = opened
        self._certain = certain
        self._held = ""
        self._step: Callable[[], Piece | None] | None = self._begin
        self._thought = self._answered = False

    def hear(self, ids: Sequence[int]) -> list[Piece]:
        """What they add."""
        if self._step is None:
            return []
        self._held += self._text.hear(ids)
        pieces: list[Piece] = []
        step = None
        while self._step is not None and self._step != step:
            step = self._step
            piece = step()
            if piece is not None and piece.text:
                pieces.append(piece)
        return pieces

    def _begin(self) -> None:
        """Is it reasoning?"""
        begun = self._held.lstrip()
        if begun != OPEN and OPEN.startswith(begun):
            return
        if begun.startswith(OPEN) or self._opened:
            self._held = begun.removeprefix(OPEN)
            self._step = self._think
        else:
            self._step = self._answer

    def _think(self) -> Piece:
        if not self._thought:
            self._held = self._held.lstrip()
        end = self._held.find(CLOSE)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip(), self._held[end + len(CLOSE) :]
            self._step = self._turn
        else:
            thought = self._held[: before_part_of(self._held, CLOSE)].rstrip()
            self._held = self._held[len(thought) :]
        self._thought = self._thought or bool(thought)
        return Piece("reasoning", thought)

    def _turn(self) -> None:
        """From reasoning to answer."""
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._answer

    def _answer(self) -> Piece:
        certain = Certain(len(self._held), False)
        if self._certain is not None:
            certain = self._certain(self._held, self._answered)
        content, self._held = self._held[: certain.characters], self._held[certain.characters :]
        self._answered = self._answered or bool(content)
        if certain.ends:
            self._step = None
        return Piece("text", content)


def before_part_of(text: str, marker: str) -> int:
    """Where a marker may begin that the text's end cuts off; the text's length where none may."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return at
        at = text.find(marker[0], at + 1)
    return len(text)
