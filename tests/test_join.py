"""`gyre join` as a user starts it, to a job whose cells only say that they live."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gyre.actors import Actor, ChildSpec, handles
from gyre.cli import app
from gyre.harness.far import JoinHarness, LeaveHarness
from gyre.join import CannotJoin, address_of
from tests.cell.test_satellites import TOKEN, Job, Retired
from tests.run.jobs import ROOT, joined_folder

GYRE = "from gyre.cli import app; app()"


@pytest.fixture
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    job = Job(tmp_path)
    async with job.root:
        yield job


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(TOKEN)
    path.chmod(0o600)
    return path


def rewrite(token: Path, text: str, mode: int = 0o600) -> None:
    token.write_text(text)
    token.chmod(mode)


class Joining:
    """One that joins. `said` are its lines so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said: list[str] = []

    async def says(self, words: str) -> None:
        assert self._process.stderr is not None
        while not self.said or words not in self.said[-1]:
            line = await self._process.stderr.readline()
            assert line, f"it has not said {words!r}: {self.said}"
            self.said.append(line.decode().rstrip())

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def shm_folder(self) -> Path:
        return joined_folder(self._process.pid)

    async def exit(self) -> int:
        assert self._process.stderr is not None
        self.said += (await self._process.stderr.read()).decode().splitlines()
        return await self._process.wait()


@asynccontextmanager
async def joining(*arguments: str | Path) -> AsyncIterator[Joining]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", GYRE, "join", *map(str, arguments)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Joining(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def address(job: Job) -> str:
    return (await job.root.listen()).removeprefix("tcp:")


async def test_it_joins_and_ends_with_0_when_the_job_is_over(job: Job, token: Path) -> None:
    await job.start(cells=2, nodes=1)
    async with joining(await address(job), "--token-file", token, "--name", "m") as machine:
        up = (await job.up(1))["cell-1"]
        assert up.far
        await machine.says("joined")
        folder = machine.shm_folder()
        assert folder.exists()
        await job.root.stop(job.satellites)
        assert await machine.exit() == 0
        assert "job_over" in machine.said[-1]
    assert not folder.exists()


async def test_ctrl_c_drains_it(job: Job, token: Path) -> None:
    await job.start(cells=2, nodes=1)
    async with joining(await address(job), "--token-file", token) as machine:
        await job.up(1)
        await machine.says("joined")
        machine.signal(signal.SIGINT)
        assert await machine.exit() == 0
        assert "left" in machine.said[-1]
    assert await job.witness.said.get() == Retired(cell="cell-1")
    await job.root.stop(job.satellites)


async def test_when_the_job_is_lost_it_stops_its_cells_and_ends_with_1(job: Job, token: Path) -> None:
    await job.start(cells=2, nodes=1)
    async with joining(await address(job), "--token-file", token) as machine:
        up = (await job.up(1))["cell-1"]
        await machine.says("joined")
        for link in job.root.links.all():
            link.give_up("the job's machine is gone")
        assert await machine.exit() == 1
        assert "is lost" in machine.said[-1]
    with pytest.raises(ProcessLookupError):
        os.kill(up.pid, 0)
    await job.root.stop(job.satellites)


class Machines(Actor):
    """What plays executions of the job hears of those that join and leave."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[JoinHarness | LeaveHarness] = asyncio.Queue()

    @handles(JoinHarness)
    async def join(self, message: JoinHarness) -> None:
        self.said.put_nowait(message)

    @handles(LeaveHarness)
    async def leave(self, message: LeaveHarness) -> None:
        self.said.put_nowait(message)


async def test_it_plays_executions_and_takes_no_cells(job: Job, token: Path) -> None:
    machines = Machines()
    await job.root.spawn(ChildSpec(name="harness", start=lambda: machines))
    await job.start(cells=2, nodes=0)
    assert not (await job.up(1))["cell-1"].far
    takes = ("--cells", "0", "--executions", "3")
    async with joining(await address(job), "--token-file", token, *takes) as machine:
        joined = await machines.said.get()
        assert joined == JoinHarness(node=joined.node, executions=3)
        await machine.says("joined")
        machine.signal(signal.SIGINT)
        assert await machine.exit() == 0
    assert await machines.said.get() == LeaveHarness(node=joined.node)
    await job.root.stop(job.satellites)


def test_a_machine_that_takes_nothing_has_nothing_to_join_for(token: Path) -> None:
    result = CliRunner().invoke(app, ["join", "127.0.0.1:9", "--token-file", str(token), "--cells", "0"])
    assert result.exit_code == 2
    assert "neither --cells nor --executions" in result.stderr


async def test_it_waits_for_a_job_that_is_not_there_yet(job: Job, token: Path) -> None:
    async with joining(await address(job), "--token-file", token) as machine:
        await machine.says("waiting_for_job")
        await job.start(cells=2, nodes=1)
        await machine.says("joined")
        await job.root.stop(job.satellites)
        assert await machine.exit() == 0


async def test_another_token_is_refused_with_3(job: Job, token: Path) -> None:
    rewrite(token, secrets.token_hex(32))
    where = await address(job)
    async with joining(where, "--token-file", token) as machine:
        assert await machine.exit() == 3
        assert machine.said == [f"{where}: wrong token"]


async def test_a_machine_that_does_not_see_the_jobs_folders_says_which(job: Job, token: Path) -> None:
    job.folder = job.folder / "only here"
    await job.start(cells=2, nodes=1)
    async with joining(await address(job), "--token-file", token) as machine:
        assert await machine.exit() == 1
        assert f"does not see {job.folder}" in machine.said[-1]
    await job.root.stop(job.satellites)


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("127.0.0.1:1", "--wait-s", "0"), 1, "no job answers at 127.0.0.1:1"),
        (("127.0.0.1",), 2, "is no address of a job"),
        (("127.0.0.1:1", "--listen", "192.0.2.77"), 2, "cannot listen at 192.0.2.77"),
    ],
)
async def test_what_cannot_be_is_one_line(
    token: Path, arguments: tuple[str, ...], code: int, why: str
) -> None:
    async with joining(*arguments, "--token-file", token) as machine:
        assert await machine.exit() == code
        (line,) = machine.said
        assert why in line


async def test_a_token_file_that_others_may_read_is_no_token(token: Path) -> None:
    rewrite(token, secrets.token_hex(32), mode=0o644)
    async with joining("127.0.0.1:1", "--token-file", token) as machine:
        assert await machine.exit() == 2
        assert machine.said == [f"token file {token}: others may read it: chmod 600 {token}"]


@example(text="[:1")
@example(text="[]:1")
@given(text=st.one_of(st.text(), st.from_regex(r"[a-z.\[\]:]{0,9}:[0-9]{1,6}", fullmatch=True)))
def test_an_address_is_a_host_and_a_port_or_an_error(text: str) -> None:
    try:
        host, port = address_of(text)
    except CannotJoin as error:
        assert error.code == 2
    else:
        assert host and 0 < port < 65536
        assert text.endswith(f":{port}") or text.rpartition(":")[2].lstrip("0") == str(port)
