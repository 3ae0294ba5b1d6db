"""The root's node: how the job's processes reach each other, and what machines that join must hold."""

from __future__ import annotations

from pathlib import Path

import structlog

from gyre.actors import Node
from gyre.actors.token import make_token
from gyre.actors.transport import TcpTransport
from gyre.job import Job

log = structlog.get_logger()


class CannotListen(Exception):
    """Nothing can listen at `listen`."""

    def __init__(self, listen: str, why: str) -> None:
        super().__init__(f"cluster.listen = {listen!r}: {why}")
        self.listen = listen


def cluster_token(job: Job) -> bytes | None:
    """What machines that join must hold; written where there is none yet. None where none can join. Raises
    TokenError."""
    return None if job.cluster.listen is None else make_token(_token_file(job))


def root_node(job: Job, sockets: Path) -> Node:
    """On unix sockets, unless processes of other machines must reach all of ours."""
    if job.cluster.listen is None:
        return Node(name="root", where=str(sockets))
    host, _, port = job.cluster.listen.rpartition(":")
    transport = TcpTransport(host.removeprefix("[").removesuffix("]"), int(port))
    return Node(name="root", transport=transport, token=cluster_token(job))


async def listen(node: Node, job: Job) -> None:
    """For machines that join. Raises CannotListen."""
    if job.cluster.listen is None:
        return
    try:
        endpoint = await node.listen()
    except OSError as error:
        raise CannotListen(job.cluster.listen, str(error)) from error
    address = endpoint.removeprefix("tcp:")
    log.info("cluster_listening", join=f"gyre join {address} --token-file {_token_file(job)}")


def _token_file(job: Job) -> Path:
    return job.cluster.token_file or job.run_dir / "token"
