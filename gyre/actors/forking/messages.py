"""What is said to a fork server and by it. A connection stands for one process."""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from gyre.actors.boot import Boot

# Where it listens, in the environment of those that may ask it.
FORK_SERVER = "GYRE_FORK_SERVER"
MESSAGE_BYTES = 4096


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """In a file that comes with the descriptors of the process' output and of a pipe whose other end who asks
    keeps: the process lives as long. `environment` is all of it."""

    boot: Boot
    environment: dict[str, str]
    surroundings: dict[str, str]
    folder: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """By the process itself, with its pidfd: it leads a session of its own."""

    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    why: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """By the server. Negative where it was a signal. Its pid stays its own until the connection is closed."""

    code: int


Reply = Forked | Refused | Exited


def send_request(connection: socket.socket, request: ForkRequest, output: int, life: int) -> None:
    """OSError."""
    file = memory_file(request)
    try:
        socket.send_fds(connection, [b"fork"], [file, output, life])
    finally:
        os.close(file)


def memory_file(value: Any) -> int:
    """A descriptor to read it from: what is secret in it must not be seen in a list of processes."""
    file = os.memfd_create("gyre-boot")
    with open(os.dup(file), "wb") as writer:
        writer.write(msgspec.msgpack.encode(value))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def send_reply(connection: socket.socket, reply: Reply, *files: int) -> None:
    """OSError where nobody waits for it."""
    socket.send_fds(connection, [msgspec.msgpack.encode(reply)], files)


def received_reply(connection: socket.socket) -> tuple[Reply | None, list[int]]:
    """And the files that came with it; None where the server is gone. BlockingIOError."""
    try:
        data, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None, []
    return (msgspec.msgpack.decode(data, type=Reply) if data else None), files
