"""From inside a sandbox the proxy can be reached and nothing else: what was tried is TRIED."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.actors import Node
from gyre.harness.bubblewrap import Bubblewrap
from gyre.harness.output import Output
from gyre.harness.process import Exit
from gyre.harness.sandbox import Confined, Mount, run
from tests.harness import probe
from tests.harness.conftest import needs_bwrap

Make = Callable[..., Confined]
Try = tuple[Any, ...]

PROBE = Path(__file__).with_name("probe.py")
WAY_OUT = "127.0.0.1:4181"

METADATA = ("169.254.169.254", "169.254.170.2", "fd00:ec2::254", "100.100.100.200")
ADDRESSES = ("192.0.2.1", "8.8.8.8", "10.0.0.1", "172.17.0.1", "2001:db8::1")
SOCKETS = ("/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/private")
FILES = (
    "/etc/shadow",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/etc/machine-id",
    "/root/.ssh/id_rsa",
    "/root/.bash_history",
    "/var/log/dpkg.log",
    "/var/lib/dpkg/status",
    "/boot",
    "/run",
    "/srv",
    "/mnt",
    "/sys",
    "/dev/kmsg",
    "/dev/mem",
    "/dev/vda",
    "/dev/sda",
    "/dev/fuse",
    "/dev/net/tun",
    "/dev/nvidia0",
    "/dev/kvm",
)
READS = (
    "/proc/1/root/etc/shadow",
    "/proc/1/cwd/secret",
    "/proc/1/environ",
    "/proc/1/mem",
    "/proc/1/fd/0",
    "/proc/kcore",
    "/proc/kmsg",
    "/dev/console",
)
WRITES = (
    "/etc/passwd",
    "/usr/bin/python3",
    "/gyre/code/gyre/harness/bridge.py",
    "/gyre/prompt.md",
    "/gyre/proxy/socket",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sysrq-trigger",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/net/ipv4/ip_forward",
)
# Numbers inside count from 1, and few are used.
NONE_INSIDE_FROM = 64
RAW = (
    (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
    (socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
    (socket.AF_PACKET, socket.SOCK_RAW, 768),
    (socket.AF_PACKET, socket.SOCK_DGRAM, 768),
)
# Bluetooth, keys, cryptography, virtual machines, TIPC, express data path.
OTHER_FAMILIES = (31, 15, 38, 40, 30, 44)
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID, PTRACE_ATTACH = 0x10000000, 0x40000000, 0x20000000, 16


def tried(host: dict[str, Any]) -> list[Try]:
    """All that must fail. `host` is what is there outside while it is tried."""
    local = [(name, port) for port in host["ports"] for name in ("127.0.0.1", "::1")]
    return [
        *(("connect", *place) for place in local),
        *(("connect", address, port) for address in METADATA for port in (80, 443)),
        *(("connect", address, port) for address in ADDRESSES for port in (22, 443)),
        *(("send", address, 53) for address in ("127.0.0.53", "127.0.0.1", "8.8.8.8")),
        *(("resolve", name) for name in ("pypi.org", "metadata.google.internal", host["name"])),
        ("neighbours",),
        *(("raw", *kind) for kind in RAW),
        *(("vsock", cid, 22) for cid in (0, 1, 2)),
        *(("unix", path) for path in (*SOCKETS, *host["sockets"])),
        *(("read", path) for path in READS),
        *(("see", path) for path in (*FILES, *host["files"])),
        *(("write", path) for path in (*WRITES, *host["files"])),
        ("create", "/dev/new"),
        *(("see", f"/proc/{pid}") for pid in host["pids"]),
        *(("signal", pid) for pid in host["pids"]),
        *(("raw", family, kind, 0) for family in OTHER_FAMILIES for kind in (1, 2, 3, 5)),
        ("call", "syscall", 425, 1, 0),
        ("call", "unshare", CLONE_NEWUSER),
        ("call", "unshare", CLONE_NEWNET),
        ("call", "unshare", CLONE_NEWPID),
        ("call", "setuid", 0),
        ("call", "chroot", 0),
        ("call", "ptrace", PTRACE_ATTACH, 1),
        ("mount", "none", "/tmp", "tmpfs"),
        ("mount", "none", "/proc", "proc"),
    ]


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Numbers of processes of the host that none inside has; in a container this one's may be 1."""
    while (child := subprocess.Popen(["sleep", "1000"])).pid < NONE_INSIDE_FROM:
        child.kill()
        child.wait()
    try:
        yield [pid for pid in (child.pid, os.getpid(), os.getppid()) if pid >= NONE_INSIDE_FROM]
    finally:
        child.kill()
        child.wait()


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write((await reader.readline()).upper())
    await writer.drain()
    writer.close()


@pytest.fixture
def bubblewrap(tmp_path: Path) -> Bubblewrap:
    made = Bubblewrap(tmp_path / "sandbox")
    made.check()
    return made


@needs_bwrap
async def test_the_proxy_is_reached_and_nothing_else(
    bubblewrap: Bubblewrap, confined: Make, pids: list[int], tmp_path: Path
) -> None:
    (tmp_path / "proxy").mkdir()
    (tmp_path / "secret").write_text("of the host")
    abstract = f"gyre-probe-{os.getpid()}-{tmp_path.name}"
    proxy = await asyncio.start_unix_server(answers, tmp_path / "proxy" / "socket")
    other = await asyncio.start_unix_server(answers, tmp_path / "other")
    hidden = await asyncio.start_unix_server(answers, "\0" + abstract)
    loopback = await asyncio.start_server(answers, "127.0.0.1", 0)
    everywhere = await asyncio.start_server(answers, "0.0.0.0", 0)
    tcp, unix = Node(name="tcp", transport="tcp"), Node(name="unix")
    async with proxy, other, hidden, loopback, everywhere, tcp, unix:
        # Where actors listen, as `tcp:HOST:PORT` and `unix:PATH`.
        actors = [(await node.listen()).partition(":")[2] for node in (tcp, unix)]
        host = {
            "ports": [
                *(server.sockets[0].getsockname()[1] for server in (loopback, everywhere)),
                int(actors[0].rpartition(":")[2]),
            ],
            "name": socket.gethostname(),
            "sockets": [f"@{abstract}", str(tmp_path / "other"), actors[1]],
            "files": [str(tmp_path / "secret"), __file__, str(Path.home() / ".profile")],
            "pids": pids,
        }
        assert all(map(os.path.exists, (*host["sockets"][1:], *host["files"][:2])))
        tries = [("answer", WAY_OUT), *tried(host)]
        found = await probed(bubblewrap, confined, tmp_path, tries)
    reached = [what for what, said in found if said == "REACHED"]
    assert reached == [["answer", WAY_OUT]]
    assert len(found) == len(tries) > 100


def test_what_the_probe_reaches_it_leaves_as_it_is(tmp_path: Path) -> None:
    """Where a wall fails, these are files of the host."""
    (tmp_path / "file").write_text("of the host")
    probe.write(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "of the host"
    with pytest.raises(FileNotFoundError):
        probe.write(str(tmp_path / "new"))
    probe.create(str(tmp_path / "new"))
    assert os.listdir(tmp_path) == ["file"]


async def probed(
    bubblewrap: Bubblewrap, confined: Make, folder: Path, tries: list[Try]
) -> list[tuple[list[Any], str]]:
    """What was tried and what came of it."""
    (folder / "workspace" / "probe.py").write_bytes(PROBE.read_bytes())
    command = confined(
        sys.executable, "-I", "-S", "probe.py", json.dumps(tries), socket=folder / "proxy" / "socket"
    )
    prompt = Mount(host=folder / "secret", inside="/gyre/prompt.md")
    command = msgspec.structs.replace(command, mounts=(*command.mounts, prompt))
    output = Output(tail_bytes=1 << 20)
    exit_ = await run(bubblewrap, command, output, timeout_s=50.0)
    assert exit_ == Exit(kind="exited", code=0), output.tail()
    return [tuple(json.loads(line)) for line in output.tail().splitlines()]
