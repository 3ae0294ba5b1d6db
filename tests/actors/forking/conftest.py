"""What the kernel of this machine can tell."""

import platform

# Of a process that another has reaped: Linux 6.15.
ENDS_ARE_KNOWN = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 15)
