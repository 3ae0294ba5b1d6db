"""Runs black-box harnesses on tasks: any command that knows an HTTP address and a key, or a user's actor.

Each execution is a supervised child with a workspace of its own, in a sandbox whose only way out is the
proxy; what it leaves is scored by an evaluator on a copy, however it ended.
"""

from gyre.harness.config import EvalConfig, EvaluatorConfig, HarnessConfig, TasksConfig
from gyre.harness.custom import Harness, Outcome, Play

__all__ = ["EvalConfig", "EvaluatorConfig", "Harness", "HarnessConfig", "Outcome", "Play", "TasksConfig"]
