"""Decode and prefill of several engines, measured in turn in the same rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.engine.work import Peer, Work
from benchmarks.report import Report

Rates = dict[tuple[str, str], float]
"""Tokens a second by (peer, figure)."""


async def measured(peers: Sequence[Peer], works: dict[str, Work], rounds: int) -> Rates:
    """Each work of each peer, the best of the rounds."""
    best: Rates = {}
    for _ in range(rounds):
        for name, work in works.items():
            for peer in peers:
                rate = work.tokens_per_s(await peer.arrivals_s(work))
                best[peer.name, name] = max(best.get((peer.name, name), 0.0), rate)
    return best


def told(report: Report, part: str, found: Rates) -> None:
    for (peer, name), value in found.items():
        report.figure(f"{part}.{name}.{peer}_tokens_per_s", value)


def compared(
    report: Report, part: str, found: Rates, pair: tuple[str, str], limits: Iterable[tuple[str, float]]
) -> None:
    """A gate for each work: the rate of the first of the pair to the other's."""
    for name, limit in limits:
        ratio = found[pair[0], name] / found[pair[1], name]
        report.at_least(f"{part}.{name}.{pair[0]}_to_{pair[1]}_ratio", ratio, limit)


def not_compared(
    report: Report, part: str, pair: tuple[str, str], limits: Iterable[tuple[str, float]], reason: str
) -> None:
    for name, limit in limits:
        report.unmet(f"{part}.{name}.{pair[0]}_to_{pair[1]}_ratio", ">=", limit, reason)
