"""What a process is told when it starts: by whom, and where its modules are."""

from __future__ import annotations

import msgspec

from gyre.actors.handshake import Peer


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """Read from the child's standard input: the token must not be seen in a list of processes. `config` is
    msgpack, decoded when the actor's class, and so its type, is known."""

    name: str
    incarnation: int
    actor: str
    config: bytes
    mailbox: int
    shutdown_s: float
    node_id: str
    parent: Peer
    parent_pid: int
    token: bytes
    transport: str
    where: str
    sys_path: list[str]
    python_path: str | None


class ServerBoot(msgspec.Struct, frozen=True, kw_only=True):
    """A fork server's. It imports `modules` at once or, if `lazy`, when it is first asked."""

    modules: tuple[str, ...]
    lazy: bool
    parent_pid: int
    sys_path: list[str]
    python_path: str | None
