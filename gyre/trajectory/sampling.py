"""Which trajectories of an execution are trained: the bounded draw.

Leaves are classed by role. From the highest class that still has unmasked tokens a leaf is drawn with
probability proportional to the unmasked tokens of its path; its whole path is masked then, so that a shared
prefix is trained once; until nothing is trainable or the bound is reached.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from gyre.trajectory.records import Role
from gyre.trajectory.roles import Roles
from gyre.trajectory.tree import Bools, Node, TrajectoryTree

PRIORITY: tuple[Role, ...] = ("main", "main_summary", "sub_agent", "sub_agent_summary")


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that was drawn: the path to `leaf`, of which it trains the tokens sampled by the nodes
    `trains`, which no earlier draw trained."""

    leaf: int
    role: Role
    trains: frozenset[int]


def generator(seed: int, execution: str) -> np.random.Generator:
    """The stream of random numbers that belongs to an execution (or to a group) under a seed."""
    digest = hashlib.sha256(execution.encode()).digest()
    return np.random.default_rng([seed % 2**64, int.from_bytes(digest[:16], "little")])


def draw(
    tree: TrajectoryTree, roles: Roles, max_trajectories: int, random: np.random.Generator
) -> list[Draw]:
    """At most `max_trajectories` draws, in order."""
    paths = {leaf.index: [node.index for node in tree.path(leaf)] for leaf in tree.leaves()}
    unmasked = np.array([node.sampled_tokens for node in tree.nodes], np.int64)
    draws: list[Draw] = []
    while len(draws) < max_trajectories:
        leaves, counts = _highest_class(paths, roles, unmasked)
        if not leaves:
            break
        bounds = np.cumsum(counts)
        leaf = leaves[int(np.searchsorted(bounds, random.integers(bounds[-1]), side="right"))]
        trains = frozenset(index for index in paths[leaf] if unmasked[index])
        draws.append(Draw(leaf=leaf, role=roles.of_node[leaf], trains=trains))
        unmasked[paths[leaf]] = 0
    return draws


def trainable(path: list[Node], drawn: Draw) -> Bools:
    """The mask of a drawn path: true where its token is trained by this draw."""
    return np.concatenate([node.tokens.sampled & (node.index in drawn.trains) for node in path])


def _highest_class(
    paths: dict[int, list[int]], roles: Roles, unmasked: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[list[int], list[int]]:
    """Leaves of the class whose turn it is, with their unmasked tokens, all positive."""
    by_role: dict[Role, list[tuple[int, int]]] = {}
    for leaf, path in paths.items():
        if tokens := int(unmasked[path].sum()):
            by_role.setdefault(roles.of_node[leaf], []).append((leaf, tokens))
    for role in PRIORITY:
        if role in by_role:
            return [leaf for leaf, _ in by_role[role]], [tokens for _, tokens in by_role[role]]
    return [], []
