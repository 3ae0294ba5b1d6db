"""What a process inherits beside its environment and its files."""

from __future__ import annotations

import os
from pathlib import Path

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
STATUS = ("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")


def surroundings() -> dict[str, str]:
    """Of this process: a fork is that of the server's, an exec would be that of whoever asks for it."""
    of = Path("/proc/self")
    found = {name: os.readlink(of / "ns" / name) for name in NAMESPACES}
    for line in (of / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in STATUS or name.startswith("Cap"):
            found[name] = value.strip()
    for line in (of / "limits").read_text().splitlines()[1:]:
        found[line[:26].strip()] = line[26:].strip()
    found["control group"] = (of / "cgroup").read_text()
    found["priority"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    return found
