"""Which trajectories of an execution are trained: the draw.

Leaves are classed by role, in order of priority. A drawn leaf's whole path is masked, so that a shared prefix
is trained once. What is drawn next is the rule's:
- `paper`: from the highest class that still has unmasked tokens, a leaf with probability proportional to the
  unmasked tokens of its path;
- `coverage`: a class whose best leaf would add less than COVERAGE_FLOOR of what the best of all would add is
  skipped; of the first that is not, the leaf that adds most;
- `all`: every leaf, by class and in the order they were recorded.
The first two end when nothing is trainable or the bound is reached.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from gyre.trajectory.config import DrawRule
from gyre.trajectory.records import Role
from gyre.trajectory.roles import Roles
from gyre.trajectory.tree import Bools, Node, TrajectoryTree

PRIORITY: tuple[Role, ...] = ("main", "main_summary", "sub_agent", "sub_agent_summary")
COVERAGE_FLOOR = 0.25


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
    tree: TrajectoryTree,
    roles: Roles,
    max_trajectories: int,
    random: np.random.Generator,
    *,
    rule: DrawRule = "paper",
    barred: Collection[int] = (),
) -> list[Draw]:
    """At most `max_trajectories` draws (with `all` as many as there are), in order. The tokens of `barred`
    nodes are not trained, whoever has them on its path."""
    rest = _Rest(tree, roles, barred)
    if rule == "all":
        return [rest.take(leaf) for leaf in rest.leaves if rest.has_unmasked(leaf)]
    draws: list[Draw] = []
    while len(draws) < max_trajectories and (classes := rest.classes()):
        leaf = _in_proportion(classes[0], random) if rule == "paper" else _by_coverage(classes)
        draws.append(rest.take(leaf))
    return draws


def trainable(path: list[Node], drawn: Draw) -> Bools:
    """The mask of a drawn path: true where its token is trained by this draw."""
    return np.concatenate([node.tokens.sampled & (node.index in drawn.trains) for node in path])


class _Leaf(NamedTuple):
    """`unmasked` tokens of its path, all positive, and tokens of any kind there that no drawn path has."""

    node: int
    unmasked: int
    new: int


class _Rest:
    """What is left to draw from. `leaves` are in order of class, then as they were recorded."""

    def __init__(self, tree: TrajectoryTree, roles: Roles, barred: Collection[int]) -> None:
        self._roles = roles
        self._parents = [node.parent for node in tree.nodes]
        self._unmasked = [0 if node.index in barred else node.sampled_tokens for node in tree.nodes]
        self._new = [len(node.tokens.token_ids) for node in tree.nodes]
        found = [leaf.index for leaf in tree.leaves() if roles.of_node[leaf.index] in PRIORITY]
        self.leaves = sorted(found, key=lambda leaf: PRIORITY.index(roles.of_node[leaf]))

    def classes(self) -> list[list[_Leaf]]:
        """In order of priority, those that still have unmasked tokens: their leaves that have."""
        unmasked, new = _down(self._parents, self._unmasked), _down(self._parents, self._new)
        found: dict[Role, list[_Leaf]] = {}
        for leaf in self.leaves:
            if unmasked[leaf]:
                role = self._roles.of_node[leaf]
                found.setdefault(role, []).append(_Leaf(leaf, unmasked[leaf], new[leaf]))
        return list(found.values())

    def has_unmasked(self, leaf: int) -> bool:
        return any(self._unmasked[index] for index in self._path(leaf))

    def take(self, leaf: int) -> Draw:
        path = self._path(leaf)
        trains = frozenset(index for index in path if self._unmasked[index])
        for index in path:
            self._unmasked[index] = self._new[index] = 0
        return Draw(leaf=leaf, role=self._roles.of_node[leaf], trains=trains)

    def _path(self, leaf: int) -> list[int]:
        path = [leaf]
        while (parent := self._parents[path[-1]]) is not None:
            path.append(parent)
        return path


def _down(parents: list[int | None], of_node: list[int]) -> list[int]:
    """Of each node the sum along its path: parents come before their children."""
    sums: list[int] = []
    for parent, own in zip(parents, of_node, strict=True):
        sums.append(own if parent is None else own + sums[parent])
    return sums


def _in_proportion(leaves: list[_Leaf], random: np.random.Generator) -> int:
    bounds = list(accumulate(leaf.unmasked for leaf in leaves))
    return leaves[bisect_right(bounds, random.integers(bounds[-1]))].node


def _by_coverage(classes: list[list[_Leaf]]) -> int:
    """Of leaves that add as much, the one that is cheaper to compute, then the earliest."""
    best = [max(leaf.unmasked for leaf in leaves) for leaves in classes]
    leaves = next(its for its, adds in zip(classes, best, strict=True) if adds >= COVERAGE_FLOOR * max(best))
    return min(leaves, key=lambda leaf: (-leaf.unmasked, leaf.new, leaf.node)).node
