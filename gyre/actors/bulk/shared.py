"""Memory that two processes of one host share: a memfd of the sender's, which the receiver opens by /proc.

Nothing has a name in a file system: whoever is killed, the kernel frees it with its last user. That a peer
can open it proves that it is on the same host, and may."""

from __future__ import annotations

import fcntl
import mmap
import os

# Linux' own, which fcntl names since Python 3.12.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW = 1, 2, 4


class Segment:
    """The sender's side: written here, read there."""

    def __init__(self, id: int, name: str, nbytes: int) -> None:
        """OSError where there is no memory or no file descriptor for it."""
        self.id = id
        self.name = name
        self.nbytes = nbytes
        self._reserved_bytes = 0
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            # Cut short by one process it would kill the other (SIGBUS).
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL | _SHRINK | _GROW)
            self._memory = mmap.mmap(self.fd, nbytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self.fd)
            raise OSError(str(error)) from error
        self._view = memoryview(self._memory)

    def write(self, at: int, piece: memoryview) -> None:
        """OSError where there is no memory for it."""
        end = at + len(piece)
        if end > self._reserved_bytes:
            # Here a lack of memory is an error, at the first write it would be a SIGBUS.
            os.posix_fallocate(self.fd, self._reserved_bytes, end - self._reserved_bytes)
            self._reserved_bytes = end
        self._view[at:end] = piece

    def close(self) -> None:
        self._view.release()
        self._memory.close()
        os.close(self.fd)


def open_segment(pid: int, fd: int, name: str, nbytes: int) -> mmap.mmap:
    """The receiver's side. OSError where it is another host's, or not what it is said to be."""
    path = f"/proc/{pid}/fd/{fd}"
    if os.readlink(path) != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is no {name}")
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        seals = fcntl.fcntl(handle, _GET_SEALS)
        if os.fstat(handle).st_size != nbytes or not seals & _SHRINK:
            raise OSError(f"{path} has not the size and the seals it should have")
        return mmap.mmap(handle, nbytes)
    except (ValueError, OverflowError) as error:
        raise OSError(str(error)) from error
    finally:
        os.close(handle)
