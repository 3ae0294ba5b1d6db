"""Run inside a sandbox, with a JSON list of what to try as its argument: prints, for each, what came of it.

Standard library only. What is reached says `REACHED`, all else names the error."""

import ctypes
import errno
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Callable


def connect(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as end:
        end.settimeout(5.0)
        end.connect((host, port))


def send(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect((host, port))
        end.send(b"?")
        end.settimeout(0.2)
        end.recv(1)


def resolve(name: str) -> None:
    socket.getaddrinfo(name, 80)


def unix(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)


def raw(family: int, kind: int, protocol: int) -> None:
    socket.socket(family, kind, protocol).close()


def vsock(cid: int, port: int) -> None:
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as end:
        end.settimeout(5.0)
        end.connect((cid, port))


def read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def see(path: str) -> None:
    os.stat(path)


def write(path: str) -> None:
    """What can be opened is left as it is: it may be a file of the host, if a wall fails."""
    os.close(os.open(path, os.O_WRONLY))


def create(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    os.unlink(path)


def signal(pid: int) -> None:
    os.kill(pid, 0)


def answer(path: str) -> None:
    """The way out: what listens behind the port must greet."""
    host, port = path.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10.0) as end:
        end.sendall(b"hello\n")
        if end.recv(6) != b"HELLO\n":
            raise OSError(errno.EPROTO, "no greeting")


def call(name: str, *words: int) -> None:
    """A function of libc that must not succeed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*(ctypes.c_void_p(word) for word in words)) == -1:
        raise OSError(ctypes.get_errno(), name)


def mount(source: str, target: str, kind: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), 0, None) == -1:
        raise OSError(ctypes.get_errno(), "mount")


def neighbours() -> None:
    """Other interfaces than the loopback."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        for name in names:
            flags = fcntl.ioctl(end, 0x8913, struct.pack("16sH14s", name.encode(), 0, b""))
            if struct.unpack("16sH14s", flags)[1] & 1:
                return
    raise OSError(errno.ENODEV, "none that is up")


TRIES: tuple[Callable[..., None], ...] = (
    *(connect, send, resolve, unix, raw, vsock, read, see, write, create, signal, answer, call, mount),
    neighbours,
)


def main() -> None:
    tries = {function.__name__: function for function in TRIES}
    for name, *words in json.loads(sys.argv[1]):
        try:
            tries[name](*words)
            print(json.dumps([[name, *words], "REACHED"]))
        except (OSError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
            print(json.dumps([[name, *words], said]))


if __name__ == "__main__":
    main()
