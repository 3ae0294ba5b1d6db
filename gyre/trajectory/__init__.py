"""What a harness leaves: calls become a tree, the tree gets roles and a score, is sampled within a bound and
packed into micro-steps, which a queue hands to training cells. Cores are plain functions on numpy arrays;
actors and the journal (SQLite) around them make what was acknowledged durable."""

from gyre.trajectory.advantage import advantages
from gyre.trajectory.config import SamplingConfig
from gyre.trajectory.ledger import Excluded, Ledger, Reason, Trained
from gyre.trajectory.pack import PlannedGroup, ScoredExecution, plan_group, sample
from gyre.trajectory.records import CallRecord, ExecutionResult, ExecutionSpec, Role
from gyre.trajectory.roles import ExecutionCounts, Roles, classify
from gyre.trajectory.sampling import Draw, draw, trainable
from gyre.trajectory.tree import Node, Tokens, TrajectoryTree, TreeError

__all__ = [
    "CallRecord",
    "Draw",
    "Excluded",
    "ExecutionCounts",
    "ExecutionResult",
    "ExecutionSpec",
    "Ledger",
    "Node",
    "PlannedGroup",
    "Reason",
    "Role",
    "Roles",
    "SamplingConfig",
    "ScoredExecution",
    "Tokens",
    "Trained",
    "TrajectoryTree",
    "TreeError",
    "advantages",
    "classify",
    "draw",
    "plan_group",
    "sample",
    "trainable",
]
