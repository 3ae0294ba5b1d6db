"""A filter of system calls, for what namespaces do not keep in.

Sockets of some families (AF_VSOCK, to the host of a virtual machine) belong to no network namespace. In a
user namespace of its own a command could mount memory that nobody counts. And the sandbox's first process is
of the same user as the command, which could take its turns and its files from it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import NamedTuple


class _Machine(NamedTuple):
    """Of the Linux ABI: audit architecture, and numbers of system calls."""

    architecture: int
    socket: int
    clone: int
    unshare: int
    prctl: int
    # `prlimit64`, `sched_setparam`, `_setscheduler`, `_setaffinity` and `_setattr`.
    of_a_process: tuple[int, ...]
    # `setpriority` and `ioprio_set`.
    of_some: tuple[int, ...]


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 41, 56, 272, 157, (302, 142, 144, 203, 314), (141, 251)),
    "aarch64": _Machine(0xC00000B7, 198, 220, 97, 167, (261, 118, 119, 122, 274), (140, 30)),
}
_X32 = 0x40000000
# The same everywhere. The first could make sockets unseen, of the other the flags cannot be seen: without it
# `clone` is used.
_IO_URING_SETUP, _CLONE3 = 425, 435
_NEW_USER = 0x10000000
_PR_SET_DUMPABLE = 4
# What they mean by their first argument from here on: all processes of a user, and others with them.
_OF_MANY = 2
_FIRST_PROCESS = 1
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
STEP_BYTES = 8
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)

_Step = tuple[int, int, str, str]


def program(machine: str | None = None) -> bytes | None:
    """A classic BPF program that forbids sockets of other families than FAMILIES, user namespaces, limits and
    priorities for the first process, and what would go round it (other ABIs of the machine, io_uring). None
    for a machine of another architecture."""
    if (known := _MACHINES.get(machine or os.uname().machine)) is None:
        return None
    return _assembled(
        {
            "": [
                (_LOAD, _ARCHITECTURE, "", ""),
                (_JUMP_EQUAL, known.architecture, "", "unknown"),
                (_LOAD, _NUMBER, "", ""),
                (_JUMP_ABOVE, _X32, "unknown", ""),
                (_JUMP_EQUAL, _IO_URING_SETUP, "unknown", ""),
                (_JUMP_EQUAL, _CLONE3, "unknown", ""),
                (_JUMP_EQUAL, known.clone, "flags", ""),
                (_JUMP_EQUAL, known.unshare, "flags", ""),
                *((_JUMP_EQUAL, call, "process", "") for call in known.of_a_process),
                *((_JUMP_EQUAL, call, "some", "") for call in known.of_some),
                (_JUMP_EQUAL, known.socket, "", "allow"),
                (_LOAD, _FIRST_ARGUMENT, "", ""),
                *((_JUMP_EQUAL, family, "allow", "") for family in FAMILIES),
                (_RETURN, _ERROR | errno.EAFNOSUPPORT, "", ""),
            ],
            "flags": [(_LOAD, _FIRST_ARGUMENT, "", ""), (_JUMP_SET, _NEW_USER, "forbidden", "allow")],
            "some": [
                (_LOAD, _FIRST_ARGUMENT, "", ""),
                (_JUMP_ABOVE, _OF_MANY, "forbidden", ""),
                (_LOAD, _SECOND_ARGUMENT, "", ""),
                (_JUMP_EQUAL, _FIRST_PROCESS, "forbidden", "allow"),
            ],
            "process": [
                (_LOAD, _FIRST_ARGUMENT, "", ""),
                (_JUMP_EQUAL, _FIRST_PROCESS, "forbidden", "allow"),
            ],
            "allow": [(_RETURN, _ALLOW, "", "")],
            "forbidden": [(_RETURN, _ERROR | errno.EPERM, "", "")],
            "unknown": [(_RETURN, _ERROR | errno.ENOSYS, "", "")],
        }
    )


def open_to_looks(machine: str | None = None) -> bytes | None:
    """One beside the first, by which `prctl(PR_SET_DUMPABLE, ...)` does nothing and says that it did: a
    program that asks for it, such as ssh-agent, runs, and can still be looked into."""
    if (known := _MACHINES.get(machine or os.uname().machine)) is None:
        return None
    return _assembled(
        {
            "": [(_LOAD, _NUMBER, "", ""), (_JUMP_EQUAL, known.prctl, "", "allow")],
            "option": [(_LOAD, _FIRST_ARGUMENT, "", ""), (_JUMP_EQUAL, _PR_SET_DUMPABLE, "", "allow")],
            "done": [(_RETURN, _ERROR, "", "")],
            "allow": [(_RETURN, _ALLOW, "", "")],
        }
    )


def _assembled(blocks: dict[str, list[_Step]]) -> bytes:
    """Jumps go to the begin of a block; without a name to the next step."""
    steps = [step for block in blocks.values() for step in block]
    begins, at = {}, 0
    for name, block in blocks.items():
        begins[name] = at
        at += len(block)
    return b"".join(
        struct.pack("=HBBI", code, *(begins[to] - at - 1 if to else 0 for to in (if_so, if_not)), value)
        for at, (code, value, if_so, if_not) in enumerate(steps)
    )
