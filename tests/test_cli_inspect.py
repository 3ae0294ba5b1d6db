from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.actors import AwaitChild, ChildSpec, Node, ProcessSpec, Ref, Supervisor
from gyre.actors.desk import Find
from gyre.actors.looking import CONTACT, Contact, ContactError, offered, read_contact
from gyre.actors.looking.contact import LONGEST_BYTES, VERSION, parse_contact, write_contact
from tests.actors.zoo import Add, AddToPeer, Counter, CounterConfig

ZOO = "tests.actors.zoo"
ROOT = Path(__file__).parents[1]


async def start(*arguments: str | Path, cwd: Path = ROOT) -> asyncio.subprocess.Process:
    """`gyre inspect` as a user calls it."""
    code = "from gyre.cli import app; app()"
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", code, "inspect", *map(str, arguments)),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def gyre(*arguments: str | Path, cwd: Path = ROOT) -> tuple[int, str, str]:
    """Its exit code and what it printed."""
    process = await start(*arguments, cwd=cwd)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def run_dir(tmp_path: Path) -> AsyncIterator[Path]:
    """The folder of what looks like a job: a supervisor with an actor here and one in another process."""
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    async with Node("root") as node, offered(node, folder / CONTACT):
        await node.spawn(ChildSpec(name="here", start=Counter, restart="temporary"))
        here = node.lookup("here")
        far = ProcessSpec(name="far", actor=f"{ZOO}:Counter", config=CounterConfig(peer=here))
        await node.spawn(ChildSpec(name="top", start=lambda: Supervisor([far]), restart="temporary"))
        yield folder


# --- a living job ---------------------------------------------------------------------------------------


async def test_the_tree_in_plain_text(run_dir: Path) -> None:
    code, out, err = await gyre("--run", run_dir, "--over", "0.1")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines() if line.split()[0] not in ("process",)]
    assert names == ["root", "here", "top", "far"]
    assert "mailbox 0/1024" in out
    assert "\x1b" not in out


async def test_the_newest_job_of_runs_is_the_default(run_dir: Path) -> None:
    code, out, err = await gyre("top/far", "--over", "0", "--json", cwd=run_dir.parents[1])
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["path"], report["kind"], report["state"]) == ("top/far", f"{ZOO}:Counter", "running")
    assert report["node"]["name"] == "far"


async def test_a_path_that_leads_nowhere_names_what_there_is(run_dir: Path) -> None:
    code, out, err = await gyre("top/nobody", "--run", run_dir)
    assert (code, out) == (2, "")
    assert err == "no actor 'top/nobody': top has far\n"


async def test_a_trace_shows_causes_across_processes(run_dir: Path) -> None:
    contact = read_contact(run_dir / CONTACT)
    async with Node("client", token=contact.token) as client:
        root = client.desk(client.bind(contact.node_id, contact.endpoint, 0, "root", 1))
        far = await find(root, "far")
        tracing = asyncio.ensure_future(gyre("--run", run_dir, "--trace", "3", "--json"))
        while not tracing.done():
            await far.ask(AddToPeer(amount=1))
            await asyncio.sleep(0.05)
        code, out, err = await tracing
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    by_id = {line["id"]: line for line in lines}
    caused = [line for line in lines if line["cause"] in by_id]
    assert caused
    assert {(line["actor"], line["message"]) for line in caused} == {("here", f"{ZOO}:Add")}
    assert {by_id[line["cause"]]["actor"] for line in caused} == {"top/far"}
    assert all(line["outcome"] == "ok" and line["duration_s"] > 0 for line in lines)


async def find(desk: Ref, name: str) -> Ref:
    top = await desk.ask(Find(name="top"))
    assert top is not None
    return await top.ask(AwaitChild(name=name))


async def test_a_trace_of_a_job_that_ends_says_so(run_dir: Path) -> None:
    async with Node("root") as node, offered(node, run_dir / "other.json"):
        ref = await node.spawn(ChildSpec(name="a", start=Counter, restart="temporary"))
        process = await start("--run", run_dir / "other.json", "--trace", "50")
        assert process.stdout is not None
        line = asyncio.ensure_future(process.stdout.readline())
        while not line.done():
            await ref.ask(Add(amount=1))
            await asyncio.sleep(0.02)
        assert "  a  Add  " in (await line).decode()
    _, err = await process.communicate()
    assert (process.returncode, err.decode()) == (3, f"{run_dir}: the job has ended\n")


# --- no living job --------------------------------------------------------------------------------------


async def test_no_such_folder(tmp_path: Path) -> None:
    code, _, err = await gyre("--run", tmp_path / "x")
    assert (code, err) == (2, f"{tmp_path / 'x'}: there is no such run folder\n")
    code, _, err = await gyre(cwd=tmp_path)
    assert code == 2
    assert "there is no folder runs here: name the job's folder with --run" in err


async def test_a_folder_where_no_job_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "done").mkdir(parents=True)
    code, _, err = await gyre("--run", tmp_path / "runs" / "done")
    assert code == 3
    assert "no job runs there" in err
    code, _, err = await gyre(cwd=tmp_path)
    assert (code, err) == (3, "no job of runs runs: name another's folder with --run\n")


async def test_the_file_of_a_job_that_was_killed(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True)  # noqa: ASYNC221
    write_contact(tmp_path / CONTACT, contact(pid=int(dead.stdout), endpoint=f"unix:{tmp_path}/gone"))
    code, _, err = await gyre("--run", tmp_path)
    assert code == 3
    assert f"the job is dead: process {int(dead.stdout)} is gone" in err


async def test_of_all_jobs_the_newest_that_lives_is_the_default(run_dir: Path) -> None:
    runs = run_dir.parent
    for name, content in (("dead", contact(pid=2**22 + 1)), ("damaged", contact(version=9))):
        (runs / name).mkdir()
        write_contact(runs / name / CONTACT, content)
    code, out, _ = await gyre("--over", "0", "--json", cwd=runs.parent)
    assert code == 0
    assert json.loads(out)["node"]["name"] == "root"


async def test_the_job_of_another_machine(tmp_path: Path) -> None:
    write_contact(tmp_path / CONTACT, contact(host="far-away", endpoint=f"unix:{tmp_path}/gone"))
    code, _, err = await gyre("--run", tmp_path)
    assert code == 4
    assert "the job cannot be reached from here, it runs on far-away" in err


async def test_a_wrong_token_is_refused(run_dir: Path) -> None:
    known = read_contact(run_dir / CONTACT)
    write_contact(run_dir / "wrong.json", msgspec.structs.replace(known, token=b"x" * 32))
    code, _, err = await gyre("--run", run_dir / "wrong.json")
    assert code == 4
    assert "the job cannot be reached" in err
    assert "wrong token" in err


async def test_a_job_that_does_not_answer(run_dir: Path) -> None:
    async with asyncio.timeout(30):
        listener = await asyncio.start_unix_server(lambda reader, writer: None, str(run_dir / "silent"))
        async with listener:
            silent = contact(pid=os.getpid(), endpoint=f"unix:{run_dir / 'silent'}")
            write_contact(run_dir / "silent.json", silent)
            code, _, err = await gyre("--run", run_dir / "silent.json", "--timeout", "0.5")
    assert code == 5
    assert err == f"{run_dir}: the job (process {os.getpid()}) has not answered within 0.5 s\n"


# --- the file -------------------------------------------------------------------------------------------


def contact(**changes: Any) -> Contact:
    base = Contact(
        version=VERSION,
        name="root",
        host=socket.gethostname(),
        pid=1,
        node_id="ab" * 8,
        endpoint="unix:/x",
        token=b"t" * 32,
    )
    return msgspec.structs.replace(base, **changes)


async def test_only_its_owner_can_read_the_file_and_it_goes_with_the_node(tmp_path: Path) -> None:
    path = tmp_path / CONTACT
    umask = os.umask(0o000)
    try:
        async with Node("root") as node, offered(node, path) as offer:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert read_contact(path) == offer
            assert offer.endpoint == node.endpoint != ""
    finally:
        os.umask(umask)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_job_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / f"{CONTACT}.new").write_text("half")
    (tmp_path / CONTACT).write_text("old")
    write_contact(tmp_path / CONTACT, contact())
    assert read_contact(tmp_path / CONTACT) == contact()
    assert [path.name for path in tmp_path.iterdir()] == [CONTACT]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / CONTACT).mkdir()
    with pytest.raises(OSError, match="directory"):
        write_contact(tmp_path / CONTACT, contact())
    assert [path.name for path in tmp_path.iterdir()] == [CONTACT]


def test_a_file_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / CONTACT
    write_contact(path, contact())
    path.chmod(0o644)
    with pytest.raises(ContactError, match="others may read it"):
        read_contact(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / CONTACT
    write_contact(path, contact())
    os.chown(path, 12345, 12345)
    with pytest.raises(ContactError, match="belongs to another user \\(uid 12345\\)"):
        read_contact(path)


def test_links_and_pipes_are_not_used(tmp_path: Path) -> None:
    write_contact(tmp_path / "real", contact())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ContactError, match="cannot be read"):
        read_contact(tmp_path / "link")
    with pytest.raises(ContactError, match="is no file"):
        read_contact(tmp_path / "pipe")
    with pytest.raises(ContactError, match="is no file"):
        read_contact(tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_contact_or_damaged(content: bytes) -> None:
    try:
        parse_contact(Path("x"), content)
    except ContactError as error:
        assert str(error).startswith("x: is damaged")


@given(
    st.dictionaries(
        st.sampled_from(["version", "name", "pid", "node_id", "endpoint", "token", "more"]),
        st.none() | st.integers() | st.text("a1é=") | st.lists(st.integers(), max_size=2),
    )
)
def test_any_json_is_a_contact_or_an_error_that_says_why(fields: dict[str, Any]) -> None:
    whole = msgspec.json.decode(msgspec.json.encode(contact()))
    try:
        found = parse_contact(Path("x"), json.dumps({**whole, **fields}).encode())
    except ContactError as error:
        assert "is damaged" in str(error) or "is of version" in str(error)
    else:
        assert found.version == VERSION


@given(name=st.text('aé\n"'), pid=st.integers(0, 2**31), endpoint=st.text(":/x"), token=st.binary())
def test_what_is_written_is_read(**fields: Any) -> None:
    one = contact(**fields)
    assert parse_contact(Path("x"), msgspec.json.encode(one)) == one


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(ContactError, match="too long"):
        parse_contact(Path("x"), b" " * (LONGEST_BYTES + 1))
