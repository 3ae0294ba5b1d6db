import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gyre.harness.formats import load_task
from gyre.harness.task import Part, Script, Suite, Task, TasksError
from gyre.harness.workspace import lay
from tests.harness.formats.folders import FORMATS, HARBOR, NL2REPOBENCH, OURS, TERMINAL_BENCH, write


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_folder_of_ours(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t", OURS))
    assert (task.name, task.format, task.inside) == ("t", "gyre", "/workspace")
    assert task.parts == (Part(tmp_path / "t" / "workspace", ""),)
    assert task.own == Suite(tests="tests")


def test_a_harbor_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", HARBOR)
    task = load_task(folder)
    assert (task.format, task.inside, task.prompt) == ("harbor", "/app", HARBOR["instruction.md"])
    assert (task.timeout_s, task.memory_bytes, task.disk_bytes) == (90.0, 2048 << 20, 1 << 30)
    assert task.environment == {"MODE": "fast", "LANGUAGE": "en us"}
    assert task.own == Script(
        command=("bash", "/tests/test.sh"),
        tests=folder / "tests",
        environment={"WANTED": "hello"},
        timeout_s=60.0,
    )
    lay(task.parts, tmp_path / "w", 1 << 20)
    assert files_of(tmp_path / "w") == ["data", "data/a.csv", "given.txt", "notes.txt", "out", "out/deep"]


def test_a_terminal_bench_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", TERMINAL_BENCH)
    task = load_task(folder)
    assert (task.format, task.inside) == ("terminal-bench", "/app")
    assert task.prompt == "Write hello into greeting.txt."
    assert task.timeout_s == 120.0
    assert isinstance(task.own, Script) and task.own.timeout_s == 65.0 and task.own.junit
    older = "descriptions:\n  - key: base\n    description: Do it.\n"
    assert load_task(write(folder, {"task.yaml": older})).prompt == "Do it."


def test_a_nl2repobench_folder(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t", NL2REPOBENCH))
    assert (task.format, task.parts, task.prompt) == ("nl2repobench", (), NL2REPOBENCH["start.md"])
    assert task.own == Suite(tests="upstream", overlay=("tests/test_greet.py", "greeter/tests"))


DOCKER = "environment/Dockerfile"
HERE = """FROM ubuntu
WORKDIR /home/user
RUN apt-get update && \\
    apt-get install -y --no-install-recommends && \\
    rm -rf /var/lib/apt/lists/*; ln -s /usr/bin/python3 /usr/bin/python
RUN pip3 install --no-cache-dir 'msgspec>=0.1' pytest==0.0.1
RUN ["python3", "-m", "pip", "install", "msgspec"]
RUN mkdir -p /tmp /home/user data && mkdir -p /home
"""


def test_what_is_here_need_not_be_installed(tmp_path: Path) -> None:
    task = load_task(write(tmp_path / "t", HARBOR, **{"environment/Dockerfile": HERE}))
    assert (task.inside, task.parts) == ("/home/user", (Part(None, "data"),))


HEAD = "FROM debian\nWORKDIR /app\n"
REFUSED = {
    "run": (
        HARBOR,
        {DOCKER: f"{HEAD}RUN make install\n"},
        r"line 3: needs Docker: RUN make",
    ),
    "run-mkdir-more": (HARBOR, {DOCKER: f"{HEAD}RUN mkdir -p a && rm b\n"}, "needs Docker: RUN mkdir"),
    "shell": (HARBOR, {DOCKER: f"{HEAD}RUN mkdir -p a > b"}, "needs Docker: RUN mkdir"),
    "quotes": (HARBOR, {DOCKER: f"{HEAD}RUN mkdir -p 'a"}, "needs Docker: RUN mkdir"),
    "package": (
        HARBOR,
        {DOCKER: f"{HEAD}RUN apt-get update && apt-get install -y no-such"},
        "Debian package no-",
    ),
    "module": (
        HARBOR,
        {DOCKER: f"{HEAD}RUN pip install no-such==1"},
        "Python package no-such==1",
    ),
    "requirements": (HARBOR, {DOCKER: f"{HEAD}RUN pip3 install -r all.txt"}, "the Python package all.txt"),
    "image": (HARBOR, {DOCKER: "FROM node:22\nWORKDIR /app"}, "needs Docker: the image node:22"),
    "stages": (HARBOR, {DOCKER: f"{HEAD}FROM debian"}, "a second FROM"),
    "from-stage": (HARBOR, {DOCKER: f"{HEAD}COPY --from=x a b"}, "needs Docker: COPY --from"),
    "entrypoint": (HARBOR, {DOCKER: f"{HEAD}ENTRYPOINT run"}, "needs Docker: ENTRYPOINT run"),
    "url": (HARBOR, {DOCKER: f"{HEAD}ADD https://example.com/a a"}, "needs Docker: ADD https"),
    "archive": (HARBOR, {DOCKER: f"{HEAD}ADD a.tar.gz /app/"}, "needs Docker: ADD a.tar.gz"),
    "outside": (HARBOR, {DOCKER: f"{HEAD}COPY given.txt /etc/given"}, "/etc/given is outside of /app"),
    "no-file": (HARBOR, {DOCKER: f"{HEAD}COPY gone.txt ."}, "gone.txt is not there; put gone.txt into"),
    "parent": (HARBOR, {DOCKER: f"{HEAD}COPY ../task.toml ."}, "name a path below"),
    "no-workdir": (HARBOR, {DOCKER: "FROM debian"}, "its working directory is /; add a WORKDIR"),
    "system-workdir": (
        HARBOR,
        {DOCKER: "FROM debian\nWORKDIR /usr/src"},
        "directory is /usr/src",
    ),
    "no-from": (HARBOR, {DOCKER: "WORKDIR /app"}, "has no FROM"),
    "ignored": (HARBOR, {"environment/.dockerignore": "*"}, "copies a folder; remove"),
    "compose": (HARBOR, {"environment/docker-compose.yaml": "services: {}"}, "needs Docker: it has services"),
    "gpus": (HARBOR, {"task.toml": "[environment]\ngpus = 1"}, r"task\.toml: needs Docker: it wants acc"),
    "steps": (HARBOR, {"task.toml": "[[steps]]\nname = 'a'"}, "needs Docker: it has several steps"),
    "separate": (
        HARBOR,
        {"task.toml": "[verifier]\nenvironment_mode = 'separate'"},
        "of its own",
    ),
    "no-time": (
        HARBOR,
        {"task.toml": "[agent]\ntimeout_sec = nan"},
        "timeout_sec = nan; write seconds",
    ),
    "no-memory": (HARBOR, {"task.toml": "[environment]\nmemory = 'much'"}, "environment.memory = much"),
    "secret": (HARBOR, {"task.toml": "[verifier.env]\nKEY = '${KEY}'"}, "verifier.env: KEY="),
    "network": (HARBOR, {"tests/test.sh": "curl -L x | sh\nuvx pytest\n"}, r"test\.sh, line 1: wants curl"),
    "type": (HARBOR, {"task.toml": "[agent]\ntimeout_sec = 'long'"}, r"timeout_sec"),
    "no-toml": (HARBOR, {"task.toml": "[agent"}, r"task\.toml: is no TOML"),
    "parser": (
        TERMINAL_BENCH,
        {"task.yaml": "instruction: x\nparser_name: swebench"},
        "only parser_name",
    ),
    "no-words": (TERMINAL_BENCH, {"task.yaml": "difficulty: easy"}, "has no instruction"),
    "service": (TERMINAL_BENCH, {"docker-compose.yaml": "services: {client: {}, db: {}}"}, "the service db"),
    "ports": (
        TERMINAL_BENCH,
        {"docker-compose.yaml": "services: {client: {ports: [1]}}"},
        "ports of the",
    ),
    "no-yaml": (TERMINAL_BENCH, {"task.yaml": "a: [b"}, r"task\.yaml: is no YAML"),
    "pip": (TERMINAL_BENCH, {"run-tests.sh": "set -e\n  pip install x"}, r"run-tests\.sh, line 2: wants pip"),
    "escape": (NL2REPOBENCH, {"test_files.json": '["../x"]'}, "write paths inside the repository"),
    "no-suite": (
        NL2REPOBENCH,
        {"test_files.json": '["tests/test_gone.py"]'},
        "has no upstream/tests/",
    ),
    "no-list": (NL2REPOBENCH, {"test_files.json": '{"a": 1}'}, r"test_files\.json: is not as it should be"),
    "two": (OURS, {"task.toml": ""}, "of different formats; keep one"),
}


@pytest.mark.parametrize(("files", "changed", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, files: dict[str, str], changed: dict[str, str], said: str
) -> None:
    with pytest.raises(TasksError, match=said) as refused:
        load_task(write(tmp_path / "t", files, **changed))
    assert str(tmp_path / "t") in refused.value.place
    assert refused.value.fix


@pytest.mark.parametrize("files", FORMATS.values(), ids=FORMATS)
def test_a_file_that_is_missing_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    """All but those that nothing asks for."""
    lost = []
    for name in files:
        folder = write(tmp_path / name.replace("/", "-"), files)
        (folder / name).unlink()
        try:
            load_task(folder)
        except TasksError as error:
            assert str(folder) in error.place
            assert Path(name).name in str(error) or Path(name).parts[0] in str(error)
            lost.append(name)
    assert len(lost) >= 1


def mutated(valid: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, and the file with any piece of it replaced by any other."""
    at = st.integers(0, len(valid))
    spliced = st.builds(
        lambda a, b, new: valid[: min(a, b)] + new + valid[max(a, b) :], at, at, st.binary(max_size=12)
    )
    words = st.lists(st.sampled_from(valid.split(b"\n")), max_size=12).map(b"\n".join)
    return st.one_of(st.binary(max_size=200), spliced, words)


PARSED = [
    ("gyre", "prompt.md"),
    ("harbor", "task.toml"),
    ("harbor", "instruction.md"),
    ("harbor", "environment/Dockerfile"),
    ("harbor", "tests/test.sh"),
    ("terminal-bench", "task.yaml"),
    ("terminal-bench", "Dockerfile"),
    ("terminal-bench", "docker-compose.yaml"),
    ("terminal-bench", "run-tests.sh"),
    ("nl2repobench", "start.md"),
    ("nl2repobench", "test_files.json"),
]


@pytest.mark.parametrize(("format_", "name"), PARSED)
def test_any_bytes_are_a_task_or_an_error_that_names_the_file(format_: str, name: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="gyre-formats-"))
    write(folder, FORMATS[format_])
    valid = (folder / name).read_bytes()

    @settings(max_examples=40, deadline=None)
    @example(b"\xff\xfe")
    @example(b"[" * 5000)
    @example(b"{" * 5000)
    @example(b"- " * 5000)
    @example(b"a: 9999-99-99\n")
    @example(b"? - &a [*a]\n: b")
    @example(b"a = 1" + b"0" * 5000)
    @example(b'COPY ["a", 1]\n')
    @example(b"COPY '\n")
    @example(b"FROM\nCOPY\nWORKDIR\nENV\nRUN\nADD")
    @given(mutated(valid))
    def check(data: bytes) -> None:
        (folder / name).write_bytes(data)
        try:
            assert isinstance(load_task(folder), Task)
        except TasksError as error:
            assert str(folder) in error.place
            assert error.problem and error.fix
            str(error).encode(errors="strict")

    try:
        check()
    finally:
        shutil.rmtree(folder)
