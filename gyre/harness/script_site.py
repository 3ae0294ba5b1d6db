"""Keeps what lies in a workspace from being taken for pytest, or for anything that it needs: `python -m
pytest` looks for modules in its working directory first.

A copy named sitecustomize.py is on the path of a task's own script of tests, so that it is run by each Python
that begins there. Only those that run tests are begun anew, with that directory last: for others, such as the
programs under test, it stays where they expect it.
"""

import os
import sys

RUNNERS = ("pytest", "py.test", "unittest")
MARK = "workspace_last"


def begin_anew() -> None:
    # As they are while the module is looked for: "-m", and what follows its name.
    if sys.argv[0] != "-m" or sys.flags.safe_path:
        return
    module = sys.orig_argv[-len(sys.argv)].rpartition("-m")[2]
    if module in RUNNERS:
        os.execv(sys.executable, [sys.executable, "-P", "-X", MARK, *sys.orig_argv[1:]])


if MARK in sys._xoptions:
    sys.path.append(os.getcwd())
elif hasattr(sys.flags, "safe_path"):  # since Python 3.11: one in the workspace may be older
    begin_anew()
