"""Harbor: `task.toml`, `instruction.md`, `environment/Dockerfile`, `tests/test.sh`, which writes a reward."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gyre.harness.formats.dockerfile import read_image, refused
from gyre.harness.formats.reading import read_text, read_toml
from gyre.harness.formats.scripts import check_script
from gyre.harness.task import Script, Task, TasksError

MARKER = "task.toml"
MB = 1 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": MB, "G": 1 << 30, "T": 1 << 40}


class _Environment(msgspec.Struct, frozen=True):
    docker_image: str | None = None
    os: str = "linux"
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | int | None = None
    storage: str | int | None = None
    gpus: int | None = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    healthcheck: Any = None
    skills_dir: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: Any = None
    collect: list[Any] = []


class _Config(msgspec.Struct, frozen=True):
    """What is known here of the file; other keys say nothing about how a task is run."""

    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    steps: list[Any] | None = None


def load(folder: Path) -> Task:
    """Raises TasksError."""
    path = folder / MARKER
    config = read_toml(path, _Config, "write the task's configuration there")
    for problem in _beyond(config):
        raise refused(path, problem)
    prompt = read_text(folder / "instruction.md", "write the task's text there")
    context = folder / "environment"
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (context / name).exists():
            raise refused(context / name, "it has services")
    if config.environment.docker_image is not None and not (context / "Dockerfile").exists():
        raise refused(path, f"environment.docker_image = {config.environment.docker_image!r}")
    image = read_image(context / "Dockerfile", context, config.environment.workdir)
    script = folder / "tests" / "test.sh"
    check_script(script)
    environment = config.environment
    return Task(
        name=folder.name,
        folder=folder,
        prompt=prompt,
        format="harbor",
        parts=image.parts,
        inside=image.workdir,
        environment={**image.environment, **_values(path, "environment.env", environment.env)},
        timeout_s=_positive(path, "agent.timeout_sec", config.agent.timeout_sec),
        memory_bytes=_bytes(path, "memory", environment.memory_mb, environment.memory),
        disk_bytes=_bytes(path, "storage", environment.storage_mb, environment.storage),
        own=Script(
            command=("bash", "/tests/test.sh"),
            tests=script.parent,
            environment=_values(path, "verifier.env", config.verifier.env),
            timeout_s=_positive(path, "verifier.timeout_sec", config.verifier.timeout_sec),
        ),
    )


def _beyond(config: _Config) -> Iterator[str]:
    """What no sandbox here can do."""
    environment, verifier = config.environment, config.verifier
    if config.steps:
        yield "it has several steps"
    if environment.os != "linux":
        yield f"environment.os = {environment.os!r}"
    if environment.gpus or environment.tpu:
        yield "it wants accelerators"
    for name in ("mcp_servers", "healthcheck", "skills_dir"):
        if getattr(environment, name):
            yield f"environment.{name}"
    if verifier.environment is not None or verifier.collect or verifier.environment_mode == "separate":
        yield "its verifier runs in an environment of its own"


def _values(path: Path, key: str, values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not name or "=" in name or "\0" in name + value or "${" in value:
            problem, fix = f"{key}: {name}={value}", "write names without '=', and values without variables"
            raise TasksError(str(path), problem, fix)
    return values


def _positive(path: Path, key: str, value: float | None) -> float | None:
    # Written so that NaN is not.
    if value is not None and not 0 < value < 1e9:
        raise TasksError(str(path), f"{key} = {value}", "write seconds, more than 0")
    return value


def _bytes(path: Path, name: str, megabytes: int | None, words: str | int | None) -> int | None:
    key = f"environment.{name}_mb" if megabytes is not None else f"environment.{name}"
    value = megabytes * MB if megabytes is not None else None
    if value is None and words is not None:
        found = re.fullmatch(r"([0-9]{1,9})\s*([KMGT]?)(?:i?B)?", str(words).strip().upper())
        value = int(found[1]) * _UNITS[found[2]] if found else 0
    if value is not None and not 64 * MB <= value < 1 << 53:
        raise TasksError(
            str(path), f"{key} = {words if megabytes is None else megabytes}", "write 64 MB or more"
        )
    return value
