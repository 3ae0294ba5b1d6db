"""What a policy thinks before it answers, apart from its answer."""

from __future__ import annotations

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Thought(NamedTuple):
    """Sampled text: `reasoning` is None where nothing was thought, `answer` is empty where the text was cut
    off before it."""

    reasoning: str | None
    answer: str


def split_reasoning(text: str, *, opened: bool) -> Thought:
    """`opened`: the prompt ended with the opening tag. A closing tag alone closes nothing: an answer may be
    about tags."""
    head, _, answer = text.partition(CLOSE)
    begun = head.lstrip()
    if begun.startswith(OPEN):
        begun = begun[len(OPEN) :]
    elif not opened:
        return Thought(None, text)
    return Thought(begun.strip() or None, answer.lstrip())
