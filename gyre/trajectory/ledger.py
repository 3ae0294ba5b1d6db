"""Where each sampled token went: it is trained by one trajectory, or it is not, for one reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from gyre.cell.engine import SampledLeg
from gyre.trajectory.roles import Roles
from gyre.trajectory.sampling import PRIORITY, Draw
from gyre.trajectory.tree import Node, TrajectoryTree

Reason = Literal[
    "not_drawn",  # the draw was over before it came to it
    "auxiliary",  # the call is of no role that is trained
    "unfinished",  # the call was cancelled or failed: nobody was answered
    "undelivered",  # an engine sampled it, and it did not reach the proxy, or the proxy was killed with it
    "stale",  # sampled under weights that are too old: sampling.max_staleness
    "zero_advantage",  # its execution is as good as its group's mean: no gradient
    "discarded_group",  # too few of its group have a score
    "dropped",  # its execution has no score
    "earlier_attempt",  # its execution was begun anew
    "evaluation",  # of a held-out task
]


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """All sampled tokens of a call are trained by the trajectory that ends at `leaf`."""

    execution: str
    call: str
    leaf: int
    tokens: int


class Excluded(msgspec.Struct, frozen=True, kw_only=True):
    """No sampled token of a call is trained; where they are `undelivered`, none of these."""

    execution: str
    call: str
    reason: Reason
    tokens: int


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Of each call that sampled anything one entry, in one of the two; of what was not delivered another."""

    trained: tuple[Trained, ...] = ()
    excluded: tuple[Excluded, ...] = ()

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(trained=self.trained + other.trained, excluded=self.excluded + other.excluded)

    @property
    def trained_tokens(self) -> int:
        return sum(entry.tokens for entry in self.trained)

    @property
    def excluded_tokens(self) -> dict[str, int]:
        """By reason."""
        found: Counter[str] = Counter()
        for entry in self.excluded:
            found[entry.reason] += entry.tokens
        return dict(sorted(found.items()))


def untrainable(tree: TrajectoryTree, roles: Roles, oldest_version: int | None) -> dict[int, Reason]:
    """The nodes that no trajectory may train, by index. A call is as old as the oldest of its tokens."""
    found: dict[int, Reason] = {}
    for node in tree.nodes:
        if roles.of_node[node.index] not in PRIORITY:
            found[node.index] = "auxiliary"
        elif oldest_version is not None and _is_older(node, oldest_version):
            found[node.index] = "stale"
    return found


def account(tree: TrajectoryTree, draws: Sequence[Draw], barred: Mapping[int, Reason]) -> Ledger:
    """Of an execution that was drawn from. Raises ValueError where two draws train a call."""
    owners: dict[int, int] = {}
    for drawn in draws:
        for index in drawn.trains:
            if owners.setdefault(index, drawn.leaf) != drawn.leaf:
                raise ValueError(f"{tree.execution}: call {tree.nodes[index].call} is trained twice")
    trained, excluded = [], []
    for node in _sampling(tree):
        if (leaf := owners.get(node.index)) is not None:
            its = Trained(execution=tree.execution, call=node.call, leaf=leaf, tokens=node.sampled_tokens)
            trained.append(its)
        else:
            excluded.append(_excluded(tree, node, barred.get(node.index, "not_drawn")))
    excluded += _listed(tree, tree.unfinished, "unfinished")
    excluded += _listed(tree, tree.undelivered, "undelivered")
    return Ledger(trained=tuple(trained), excluded=tuple(excluded))


def all_excluded(tree: TrajectoryTree, reason: Reason) -> Ledger:
    """Of an execution that is not drawn from."""
    nodes = [_excluded(tree, node, reason) for node in _sampling(tree)]
    others = _listed(tree, tree.unfinished, reason) + _listed(tree, tree.undelivered, reason)
    return Ledger(excluded=(*nodes, *others))


def undelivered(legs: Iterable[SampledLeg], ends: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Of what engines sampled for an execution's calls what is in no record, by call. `ends` are, of each
    call that has a record, the positions in its output at which its stays at engines were over."""
    found: Counter[str] = Counter()
    for leg in legs:
        its = (0, *ends.get(leg.call, ()))
        delivered = its[leg.stay + 1] - its[leg.stay] if leg.stay + 1 < len(its) else 0
        found[leg.call] += max(0, leg.tokens - delivered)
    return dict(+found)


def _sampling(tree: TrajectoryTree) -> list[Node]:
    return [node for node in tree.nodes if node.sampled_tokens]


def _excluded(tree: TrajectoryTree, node: Node, reason: Reason) -> Excluded:
    return Excluded(execution=tree.execution, call=node.call, reason=reason, tokens=node.sampled_tokens)


def _listed(tree: TrajectoryTree, tokens_of: Mapping[str, int], reason: Reason) -> list[Excluded]:
    return [
        Excluded(execution=tree.execution, call=call, reason=reason, tokens=tokens)
        for call, tokens in tokens_of.items()
    ]


def _is_older(node: Node, oldest_version: int) -> bool:
    sampled = node.tokens.versions[node.tokens.sampled]
    return len(sampled) > 0 and int(sampled.min()) < oldest_version
