"""Reads a job file: TOML, overrides, defaults, paths, rules; and writes a resolved one."""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from gyre.job.decode import Fault, decode
from gyre.job.rules import broken_rules
from gyre.job.tables import Job


class JobError(Exception):
    """The job file at `path` cannot be run; `faults` has everything that is wrong with it."""

    def __init__(self, path: Path, faults: Sequence[Fault]) -> None:
        self.path = path
        self.faults = tuple(faults)
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n".join([f"{path}: {count}", *(f"  {fault}" for fault in faults)]))


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Reads, defaults, resolves and checks a job file. Each override is `dotted.key=value`, the value in
    TOML or else a plain string; an empty value removes the key. Raises JobError."""
    data = _read(path)
    faults = [fault for override in overrides if (fault := _override(data, override)) is not None]
    data.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", path.resolve().stem).lstrip(".-") or "job")
    data.setdefault("run_dir", f"runs/{data['name']}")
    job, found = decode(data, Job)
    faults += found
    job = _resolved(job, path.resolve().parent)
    faulty = {fault.key for fault in faults}
    faults += [fault for keys, fault in broken_rules(job) if not faulty.intersection(keys)]
    if faults:
        raise JobError(path, faults)
    return job


def load_recorded(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The resolved job of a run folder, wherever it ran: models, tasks and commands that it names need not be
    here, and keys that are no longer known are passed over. Overrides are checked as in `load_job`. Raises
    JobError."""
    data = _read(path)
    faults = [fault for override in overrides if (fault := _override(data, override)) is not None]
    job, found = decode(data, Job)
    given = {override.partition("=")[0].strip() for override in overrides}
    faults += [fault for fault in found if fault.key in given]
    if given:
        faulty = {fault.key for fault in faults}
        broken = [(set(keys), fault) for keys, fault in broken_rules(job)]
        faults += [fault for keys, fault in broken if keys & given and not keys & faulty]
    if faults:
        raise JobError(path, faults)
    return job


def resolved_toml(job: Job) -> str:
    """The job as TOML with every default written out; `load_job` reads the same job from it."""
    return tomli_w.dumps(_without_nulls(msgspec.to_builtins(job, enc_hook=str)))


# --- reading ------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        at = f"line {place[1]}, column {place[2]}" if place and place[1] else "end of file"
        fault = Fault(key=at, found=str(error).partition(" (at ")[0], allowed="TOML")
    except UnicodeDecodeError as error:
        fault = Fault(key=f"byte {error.start}", found="not UTF-8", allowed="TOML in UTF-8")
    except RecursionError:
        fault = Fault(key="file", found="nested too deeply", allowed="tables of a job file")
    except OSError as error:
        fault = Fault(key="file", found=error.strerror or str(error), allowed="a readable job file (TOML)")
    raise JobError(path, [fault])


def _override(data: dict[str, Any], override: str) -> Fault | None:
    key, equals, text = override.partition("=")
    key = key.strip()
    *tables, name = key.split(".")
    if not equals or not all([*tables, name]):
        return Fault(
            key=f"--set {override}", found="no dotted.key=value", allowed="for example train.lr=1e-5"
        )
    into: Any = data
    for at, table in enumerate(tables):
        into = into.setdefault(table, {})
        if not isinstance(into, dict):
            within = ".".join(tables[: at + 1])
            return Fault(key=f"--set {key}", found=f"{within} is a value", allowed="a key inside a table")
    if text.strip():
        into[name] = _value(text)
    else:
        into.pop(name, None)
    return None


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


# --- paths --------------------------------------------------------------------------------------


def _resolved(job: Job, folder: Path) -> Job:
    def there(path: Path) -> Path:
        with contextlib.suppress(RuntimeError):  # ~NOBODY: the rules will say that it is not there
            path = path.expanduser()
        return folder / path

    def named(recipe: str | None) -> str | None:
        file, colon, function = (recipe or "").rpartition(":")
        return f"{folder / file}:{function}" if colon and file.endswith(".py") else recipe

    def expanded(words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(word.replace("{job_dir}", str(folder)) for word in words)

    def sources(table: Any) -> Any:
        return msgspec.structs.replace(
            table, path=table.path and there(table.path), recipe=named(table.recipe)
        )

    def scorer(table: Any) -> Any:
        return replace(
            table,
            command=expanded(table.command),
            function=named(table.function),
            judge=table.judge and replace(table.judge, rubric=there(table.judge.rubric)),
        )

    replace = msgspec.structs.replace
    warm_start = job.model.warm_start
    if warm_start is not None:
        warm_start = replace(warm_start, demos=named(warm_start.demos) or "")
    harness = replace(
        job.harness,
        command=expanded(job.harness.command),
        program=job.harness.program and there(job.harness.program),
        arguments=expanded(job.harness.arguments),
        actor=named(job.harness.actor),
        environment={name: expanded((value,))[0] for name, value in job.harness.environment.items()},
        read_only=tuple(map(there, job.harness.read_only)),
    )
    python = job.rollout.sglang.python
    sglang = replace(job.rollout.sglang, python=python and there(python))
    return replace(
        job,
        run_dir=job.run_dir.absolute(),
        cluster=replace(job.cluster, token_file=job.cluster.token_file and there(job.cluster.token_file)),
        model=replace(sources(job.model), warm_start=warm_start),
        rollout=replace(job.rollout, sglang=sglang),
        harness=harness,
        tasks=sources(job.tasks),
        evaluator=replace(
            scorer(job.evaluator), mix={name: scorer(part) for name, part in job.evaluator.mix.items()}
        ),
        eval=sources(job.eval),
    )
