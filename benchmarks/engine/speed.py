"""Decode and prefill of several engines, measured in turn in the same rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from benchmarks.engine.work import Decoding, Peer, Prefilling, Work
from benchmarks.report import Report
from benchmarks.timing import Segment, rates

Rates = dict[tuple[str, str], float]
"""Tokens a second by (peer, figure)."""


async def measured(peers: Sequence[Peer], figures: dict[str, Decoding | Prefilling], rounds: int) -> Rates:
    """Each figure of each peer, from the best time of each work over the rounds."""
    works = list(dict.fromkeys(work for figure in figures.values() for work in figure.works))
    segments = [Segment(_name(peer, work), 1, partial(_once, peer, work)) for work in works for peer in peers]
    found = await rates(segments, rounds)
    return {
        (peer.name, name): figure.tokens_per_s(lambda work, peer=peer: 1 / found[_name(peer, work)])  # type: ignore[misc]
        for name, figure in figures.items()
        for peer in peers
    }


async def _once(peer: Peer, work: Work, _: int) -> float:
    return await peer.seconds(work)


def _name(peer: Peer, work: Work) -> str:
    return f"{peer.name} {work}"


def told(report: Report, part: str, found: Rates) -> None:
    for (peer, figure), value in found.items():
        report.figure(f"{part}.{figure}.{peer}_tokens_per_s", value)


def compared(
    report: Report,
    part: str,
    found: Rates,
    peer: str,
    limits: Iterable[tuple[str, float]],
    of: str = "native",
) -> None:
    """A gate for each figure: the rate of `of` to the peer's."""
    for figure, limit in limits:
        gate = f"{part}.{figure}_{of}_to_{peer}_ratio"
        report.at_least(gate, found[of, figure] / found[peer, figure], limit)


def not_compared(
    report: Report, part: str, peer: str, limits: Iterable[tuple[str, float]], reason: str
) -> None:
    for figure, limit in limits:
        report.unmet(f"{part}.{figure}_native_to_{peer}_ratio", ">=", limit, reason)
