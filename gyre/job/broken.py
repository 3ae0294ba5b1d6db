"""What a rule about several keys finds."""

from __future__ import annotations

from gyre.job.decode import Fault

Broken = tuple[frozenset[str], Fault]
"""The keys that a rule reads, and what is wrong. A rule about a key that is faulty already is moot."""


def broken(found: str, allowed: str, *keys: str) -> Broken:
    """Wrong is the first key; the others are what it was looked at with."""
    return frozenset(keys), Fault(key=keys[0], found=found, allowed=allowed)
