"""Runs black-box harnesses on tasks: any command that knows an HTTP address and a key.

Each execution is a supervised child with a workspace of its own, in a sandbox whose only way out is the
proxy; what it leaves is scored by an evaluator on a copy, however it ended.
"""

from gyre.harness.config import EvalConfig, EvaluatorConfig, HarnessConfig, TasksConfig

__all__ = ["EvalConfig", "EvaluatorConfig", "HarnessConfig", "TasksConfig"]
