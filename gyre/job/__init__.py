"""The job file: one typed Struct, read with every fault named at once, and the plan of what it takes.

Imports no torch: a job can be checked where it cannot be run."""

from gyre.job.decode import Fault
from gyre.job.load import JobError, load_job, load_recorded, resolved_toml
from gyre.job.plan import Plan, RoleMemory, plan
from gyre.job.rules import warnings
from gyre.job.tables import Job

__all__ = [
    "Fault",
    "Job",
    "JobError",
    "Plan",
    "RoleMemory",
    "load_job",
    "load_recorded",
    "plan",
    "resolved_toml",
    "warnings",
]
