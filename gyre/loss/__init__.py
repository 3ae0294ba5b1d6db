"""Losses on tokens: plain functions, usable from a notebook without a job.

`gyre.loss.gspo` needs torch; what is exported here does not.
"""

from gyre.loss.config import LossConfig
from gyre.loss.microstep import MicroStep, MicroStepStats, Trajectory

__all__ = ["LossConfig", "MicroStep", "MicroStepStats", "Trajectory"]
