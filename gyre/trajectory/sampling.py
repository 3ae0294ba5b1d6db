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
from collections.abc import Collection
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gyre.trajectory.config import DrawRule
from gyre.trajectory.records import Role
from gyre.trajectory.roles import Roles
from gyre.trajectory.tree import Bools, Node, TrajectoryTree

Int64s = npt.NDArray[np.int64]

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


class _Class(NamedTuple):
    """Leaves of one role that have unmasked tokens on their paths: how many, and tokens of any kind that are
    on no path drawn so far."""

    leaves: Int64s
    unmasked: Int64s
    new: Int64s


class _Rest:
    """What is left to draw from. `leaves` are in order of class, then as they were recorded."""

    def __init__(self, tree: TrajectoryTree, roles: Roles, barred: Collection[int]) -> None:
        self._roles = roles
        self._parents = [node.parent for node in tree.nodes]
        self._unmasked = [0 if node.index in barred else node.sampled_tokens for node in tree.nodes]
        self._new = [len(node.tokens.token_ids) for node in tree.nodes]
        found = [leaf.index for leaf in tree.leaves() if roles.of_node[leaf.index] in PRIORITY]
        self.leaves = sorted(found, key=lambda leaf: PRIORITY.index(roles.of_node[leaf]))
        self._rank = np.array([PRIORITY.index(roles.of_node[leaf]) for leaf in self.leaves], np.int64)

    def classes(self) -> list[_Class]:
        """In order of priority, those that still have unmasked tokens."""
        leaves = np.array(self.leaves, np.int64)
        unmasked, new = (_down(self._parents, of)[leaves] for of in (self._unmasked, self._new))
        kept = [(self._rank == rank) & (unmasked > 0) for rank in range(len(PRIORITY))]
        return [_Class(leaves[its], unmasked[its], new[its]) for its in kept if its.any()]

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


def _down(parents: list[int | None], of_node: list[int]) -> Int64s:
    """Of each node the sum along its path: parents come before their children."""
    sums: list[int] = []
    for parent, own in zip(parents, of_node, strict=True):
        sums.append(own if parent is None else own + sums[parent])
    return np.array(sums, np.int64)


def _in_proportion(of: _Class, random: np.random.Generator) -> int:
    bounds = np.cumsum(of.unmasked)
    return int(of.leaves[np.searchsorted(bounds, random.integers(bounds[-1]), side="right")])


def _by_coverage(classes: list[_Class]) -> int:
    """Of leaves that add as much, the one that is cheaper to compute, then the earliest."""
    floor = COVERAGE_FLOOR * max(int(of.unmasked.max()) for of in classes)
    of = next(of for of in classes if of.unmasked.max() >= floor)
    return int(of.leaves[np.lexsort((of.leaves, of.new, -of.unmasked))[0]])
