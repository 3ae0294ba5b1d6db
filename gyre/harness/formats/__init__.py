"""Folders of tasks in several formats: ours, Harbor's, Terminal-Bench's and NL2RepoBench's, each a module
that reads one folder into a Task, or says which file is wrong and what to do.
"""

from gyre.harness.formats.loading import MARKERS, load_task

__all__ = ["MARKERS", "load_task"]
