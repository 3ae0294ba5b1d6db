"""An actor that says what its process is."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy

from gyre.actors import Actor, Ask, handles
from gyre.actors.forking.surroundings import surroundings

STATUS = ("SigQ", "ShdPnd", "SigPnd", "SigBlk", "SigIgn", "SigCgt", "Threads", "Umask")


# What a fork ends by, where another has PR_SET_PDEATHSIG.
LIFE = "life"


class Self(Ask[dict[str, str]], frozen=True, kw_only=True):
    """What two processes that were started alike have alike."""


class Draw(Ask[list[str]], frozen=True, kw_only=True):
    """What no two processes have alike."""


class Parent(Ask[int], frozen=True, kw_only=True):
    """The pid of its parent."""


class Mirror(Actor):
    @handles(Self)
    async def self(self, message: Self) -> dict[str, str]:
        return {
            **_status(),
            **surroundings(),
            "environment": repr(sorted(os.environ.items())),
            "environment of libraries": repr(sorted(_c_environment())),
            "sys.path": repr(sys.path),
            "folder": os.getcwd(),
            "leads": repr((os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())),
            "gc": repr((gc.isenabled(), gc.get_threshold(), gc.get_debug())),
            "faulthandler": repr(faulthandler.is_enabled()),
            "threads": repr([thread.name for thread in threading.enumerate()]),
            "handlers": repr([type(signal.getsignal(number)) for number in signal.valid_signals()]),
            "output": repr([os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]),
            "open": repr(sorted(_kind(number) for number in os.listdir("/proc/self/fd") if number != "0")),
            "printed by": repr((type(sys.stdout), sys.stdout is sys.stderr, sys.stdout.encoding)),
        }

    @handles(Draw)
    async def draw(self, message: Draw) -> list[str]:
        return [
            str(random.random()),
            str(numpy.random.random()),
            str(uuid.uuid1()),
            str(uuid.uuid4()),
            tempfile.mktemp(),
        ]

    @handles(Parent)
    async def parent(self, message: Parent) -> int:
        return os.getppid()


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: value.strip() for name, _, value in (line.partition(":") for line in lines) if name in STATUS
    }


def _c_environment() -> Iterator[bytes]:
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    for entry in entries:
        if entry is None:
            return
        yield entry


def _kind(number: str) -> str:
    try:
        if fcntl.fcntl(int(number), fcntl.F_GETFL) & os.O_ASYNC:
            return LIFE
        return os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
    except OSError:
        return ""
