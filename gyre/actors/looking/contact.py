"""The file by which a living node is found: where it listens, and its token."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from gyre.actors.node import Node

# Its name in the folder of a run.
CONTACT = "contact.json"
VERSION = 1
LONGEST_BYTES = 16 * 1024


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever holds it can be a peer of the node, and so do all that the node can."""

    version: int
    name: str
    host: str
    pid: int
    node_id: str
    endpoint: str
    token: bytes

    @property
    def is_gone(self) -> bool:
        """It is known that its process has ended."""
        return self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists()


class ContactError(Exception):
    """It is not ours, damaged, or `absent`: there is no file at `path`."""

    def __init__(self, path: Path, problem: str, *, absent: bool = False) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.absent = absent


@asynccontextmanager
async def offered(node: Node, path: Path) -> AsyncIterator[Contact]:
    """The node listens, and is found by the file at `path` as long as the block lasts. OSError where it
    cannot be written."""
    contact = Contact(
        version=VERSION,
        name=node.name,
        host=socket.gethostname(),
        pid=os.getpid(),
        node_id=node.id,
        endpoint=await node.listen(),
        token=node.token,
    )
    await asyncio.to_thread(write_contact, path, contact)
    try:
        yield contact
    finally:
        remove_contact(path)


def remove_contact(path: Path) -> None:
    """The node can be found no more."""
    with suppress(OSError):  # its folder is gone, or no file system takes anything any more
        path.unlink()


def write_contact(path: Path, contact: Contact) -> None:
    """Whole or not at all, for its owner only."""
    written = path.with_name(f"{path.name}.new")
    written.unlink(missing_ok=True)
    # Nobody can have opened it before its mode was what it is.
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(contact))
        os.replace(written, path)
    except OSError:
        remove_contact(written)
        raise


def read_contact(path: Path) -> Contact:
    """ContactError where there is none that can be trusted."""
    try:
        # A link or a pipe that somebody laid there is neither followed nor waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ContactError(path, "there is no such file", absent=True) from None
    except OSError as error:
        raise ContactError(path, f"cannot be read ({error.strerror})") from error
    with _closing(descriptor):
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ContactError(path, "is no file")
        if about.st_uid != os.geteuid():
            raise ContactError(path, f"belongs to another user (uid {about.st_uid})")
        if about.st_mode & 0o077:
            raise ContactError(
                path, f"others may read it (mode {about.st_mode & 0o777:o}): its token is no secret"
            )
        return parse_contact(path, os.read(descriptor, LONGEST_BYTES + 1))


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def parse_contact(path: Path, content: bytes) -> Contact:
    """ContactError where it is none of ours."""
    if len(content) > LONGEST_BYTES:
        raise ContactError(path, "is damaged: it is too long")
    try:
        contact = msgspec.json.decode(content, type=Contact)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ContactError(path, f"is damaged: {error}") from error
    if contact.version != VERSION:
        raise ContactError(path, f"is of version {contact.version}, this is gyre's {VERSION}")
    return contact
