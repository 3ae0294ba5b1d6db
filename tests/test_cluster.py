"""The root's node, as the job file has it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gyre.actors.token import TokenError, read_token
from gyre.cluster import CannotListen, cluster_token, listen, root_node
from gyre.job import Job, load_job
from tests.run.jobs import QUICKSTART


def job(tmp_path: Path, *overrides: str) -> Job:
    return load_job(QUICKSTART, [f"run_dir={tmp_path / 'run'}", *overrides])


async def test_without_listen_nothing_of_a_job_is_on_a_network(tmp_path: Path) -> None:
    alone = job(tmp_path)
    assert cluster_token(alone) is None
    (tmp_path / "sockets").mkdir()
    async with root_node(alone, tmp_path / "sockets") as node:
        await listen(node, alone)
        assert (await node.listen()).startswith("unix:")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("address", "endpoint"), [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1")])
async def test_with_listen_machines_are_told_how_to_join(tmp_path: Path, address: str, endpoint: str) -> None:
    open_to_others = job(tmp_path, f"cluster.listen={address}")
    with capture_logs() as logs:
        async with root_node(open_to_others, tmp_path) as node:
            await listen(node, open_to_others)
            where = node.endpoint.removeprefix("tcp:")
            assert node.token == read_token(tmp_path / "run" / "token")
    assert where.rpartition(":")[0] == endpoint
    token_file = tmp_path / "run" / "token"
    said = [line["join"] for line in logs if line["event"] == "cluster_listening"]
    assert said == [f"gyre join {where} --token-file {token_file}"]


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        busy = job(tmp_path, f"cluster.listen={address}")
        async with root_node(busy, tmp_path) as node:
            with pytest.raises(CannotListen, match=f"cluster.listen = '{address}'"):
                await listen(node, busy)


def test_a_token_file_of_the_job_file_is_used_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.write_text("s" * 40)
    path.chmod(0o600)
    shared = job(tmp_path, "cluster.listen=127.0.0.1:0", f"cluster.token_file={path}")
    assert cluster_token(shared) == b"s" * 40
    path.chmod(0o644)
    with pytest.raises(TokenError, match="chmod 600"):
        cluster_token(shared)
