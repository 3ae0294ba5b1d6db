"""What each engine is asked for: fresh prompts of random tokens, answered to a fixed length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal, Protocol

# Below the special tokens of no model, above those of many.
FIRST_ID, LAST_ID = 1000, 30000


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` calls at once, each with a prompt nobody has seen, `new_tokens` for each. If there is one new
    token, what counts is the prompt's own time; else the tokens that follow the first ones, by the `middle`
    step, since on a busy machine some wait for others' work, or by `all` of them, or the `whole` answers."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    counted: Literal["middle", "all", "whole"] = "middle"

    def prompts(self, draw: random.Random) -> list[tuple[int, ...]]:
        return [
            tuple(draw.randrange(FIRST_ID, LAST_ID) for _ in range(self.prompt_tokens))
            for _ in range(self.batch)
        ]

    def tokens_per_s(self, arrivals_s: Sequence[float]) -> float:
        """`arrivals_s`: since the start, when every call had one token more."""
        if self.new_tokens == 1:
            return self.batch * self.prompt_tokens / arrivals_s[0]
        if self.counted == "middle":
            return self.batch / median([after - before for before, after in pairwise(arrivals_s)])
        first, last = arrivals_s[0], arrivals_s[-1]
        if self.counted == "whole":
            return self.batch * self.new_tokens / last
        # Tokens that are told together with the first one came before it.
        return self.batch * sum(at > first for at in arrivals_s) / (last - first)


class Peer(Protocol):
    """Something that answers prompts, greedily."""

    name: str

    async def arrivals_s(self, work: Work) -> list[float]:
        """When each token came, as `Work.tokens_per_s` takes it."""
