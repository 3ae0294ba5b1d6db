"""What each engine is asked for: fresh prompts of random tokens, answered to a fixed length."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# Below the special tokens of no model, above those of many.
FIRST_ID, LAST_ID = 1000, 30000


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` calls at once, each with a prompt nobody has seen, `new_tokens` for each."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, draw: random.Random) -> list[tuple[int, ...]]:
        return [
            tuple(draw.randrange(FIRST_ID, LAST_ID) for _ in range(self.prompt_tokens))
            for _ in range(self.batch)
        ]


class Peer(Protocol):
    """Something that answers prompts, greedily."""

    name: str

    async def seconds(self, work: Work) -> float:
        """How long it takes until the last token."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The rate at which tokens follow the first ones: the difference of two answers' lengths."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def works(self) -> tuple[Work, Work]:
        return (
            Work(self.batch, self.prompt_tokens, self.new_tokens + 1),
            Work(self.batch, self.prompt_tokens, 1),
        )

    def tokens_per_s(self, seconds: Callable[[Work], float]) -> float:
        long, short = self.works
        # On a busy machine the shorter work can have been the slower one.
        return self.batch * self.new_tokens / max(seconds(long) - seconds(short), 1e-9)


@dataclass(frozen=True, slots=True)
class Prefilling:
    """The rate at which one long prompt is read."""

    prompt_tokens: int

    @property
    def works(self) -> tuple[Work, ...]:
        return (Work(1, self.prompt_tokens, 1),)

    def tokens_per_s(self, seconds: Callable[[Work], float]) -> float:
        return self.prompt_tokens / seconds(self.works[0])
