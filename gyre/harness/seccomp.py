"""A filter of system calls, for what a network namespace does not keep in.

Sockets of some families (AF_VSOCK, to the host of a virtual machine) belong to no network namespace.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

# Of the Linux ABI: audit architecture, and the number of `socket`.
_MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_X32 = 0x40000000
# The same everywhere. It could make sockets unseen.
_IO_URING_SETUP = 425
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)


def program(machine: str | None = None) -> bytes | None:
    """A classic BPF program that forbids sockets of other families than FAMILIES, and what would go round
    it (other ABIs of the machine, io_uring). None for a machine of another architecture."""
    if (known := _MACHINES.get(machine or platform.machine())) is None:
        return None
    architecture, number = known
    tests = [(_JUMP_EQUAL, family, "allow", "") for family in FAMILIES]
    steps: list[tuple[int, int, str, str]] = [
        (_LOAD, _ARCHITECTURE, "", ""),
        (_JUMP_EQUAL, architecture, "", "unknown"),
        (_LOAD, _NUMBER, "", ""),
        (_JUMP_ABOVE, _X32, "unknown", ""),
        (_JUMP_EQUAL, _IO_URING_SETUP, "unknown", ""),
        (_JUMP_EQUAL, number, "", "allow"),
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        *tests,
        (_RETURN, _ERROR | errno.EAFNOSUPPORT, "", ""),
    ]
    labels = {"": 0, "allow": len(steps), "unknown": len(steps) + 1}
    ends = [(_RETURN, _ALLOW, "", ""), (_RETURN, _ERROR | errno.ENOSYS, "", "")]
    return b"".join(
        struct.pack("=HBBI", code, *(max(0, labels[to] - at - 1) for to in (if_so, if_not)), value)
        for at, (code, value, if_so, if_not) in enumerate(steps + ends)
    )
