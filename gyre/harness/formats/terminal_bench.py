"""Terminal-Bench: `task.yaml` with the instruction, `Dockerfile`, `tests/`, a `run-tests.sh` with pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gyre.harness.formats.dockerfile import read_image, refused
from gyre.harness.formats.reading import read_yaml
from gyre.harness.formats.scripts import check_script
from gyre.harness.task import Script, Task, TasksError

MARKER = "task.yaml"
RUN_TESTS = "run-tests.sh"
# What says nothing about how a task is run, or what we do anyhow.
_KNOWN = frozenset(["build", "image", "container_name", "command", "environment", "volumes"])


class _Description(msgspec.Struct, frozen=True):
    key: str
    description: str


class _Config(msgspec.Struct, frozen=True):
    instruction: str = ""
    descriptions: list[_Description] = []
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = 360.0
    max_test_timeout_sec: float = 60.0


class _Compose(msgspec.Struct, frozen=True):
    services: dict[str, dict[str, Any]]


def load(folder: Path) -> Task:
    """Raises TasksError."""
    path = folder / MARKER
    config = read_yaml(path, _Config, "write the task's configuration there")
    prompts = [found.description for found in config.descriptions if found.key == "base"]
    prompt = config.instruction or "".join(prompts[:1])
    if not prompt.strip():
        raise TasksError(str(path), "has no instruction", "write the task's text as its instruction")
    if config.parser_name != "pytest":
        fix = "only parser_name = pytest is known here"
        raise TasksError(str(path), f"parser_name = {config.parser_name!r}", fix)
    for key in ("max_agent_timeout_sec", "max_test_timeout_sec"):
        if not 0 < getattr(config, key) < 1e9:
            raise TasksError(str(path), f"{key} = {getattr(config, key)}", "write seconds, more than 0")
    _check_services(folder / "docker-compose.yaml")
    image = read_image(folder / "Dockerfile", folder)
    check_script(folder / RUN_TESTS)
    tests = folder / "tests"
    if not tests.is_dir():
        raise TasksError(str(folder), "has no tests", "put the task's tests into a folder tests")
    return Task(
        name=folder.name,
        folder=folder,
        prompt=prompt,
        format="terminal-bench",
        parts=image.parts,
        inside=image.workdir,
        environment=image.environment,
        timeout_s=config.max_agent_timeout_sec,
        own=Script(
            command=("bash", f"/tests/{RUN_TESTS}"),
            tests=tests,
            beside=(folder / RUN_TESTS,),
            environment={"TEST_DIR": "/tests"},
            timeout_s=config.max_test_timeout_sec,
            junit=True,
        ),
    )


def _check_services(path: Path) -> None:
    if not path.exists():
        return
    for name, service in read_yaml(path, _Compose, "remove it, or name one service").services.items():
        if name != "client":
            raise refused(path, f"the service {name}")
        if beyond := sorted(set(service) - _KNOWN):
            raise refused(path, f"{beyond[0]} of the service {name}")
