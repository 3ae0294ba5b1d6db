"""What differs between the versions of SGLang from 0.5.11 to 0.5.23. All else is the same in all of them."""

from __future__ import annotations

import re

import msgspec

OLDEST = (0, 5, 11)


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What a server understands. `bracket`: weights other than those from disk are taken between
    /begin_weight_update and /end_weight_update. Where it does not, the route is not there.

    The spans of versions over a call's tokens are in its last answer since some version after 0.5.17; until
    then each answer names one version for its own tokens. Both are exact here: a server that takes weights
    has no calls."""

    bracket: bool


def parse_version(text: str) -> tuple[int, ...]:
    """`0.5.10.post1` -> (0, 5, 10, 1). ValueError."""
    found = re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:\.?(?:post|rc|dev)(\d{1,9}))?(?:\+\S*)?", text)
    if found is None:
        raise ValueError(f"{text!r} is no version of SGLang")
    return tuple(int(part) for part in found.groups() if part is not None)


def check_version(text: str) -> None:
    """ValueError for a server that is too old."""
    if parse_version(text)[:3] < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(f"SGLang {text} is too old: Gyre needs {oldest} or newer")
