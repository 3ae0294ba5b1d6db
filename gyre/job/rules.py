"""What a job must satisfy beyond its types: bounds of single keys, and combinations that cannot run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre.harness.config import EvalConfig, TasksConfig, scorers
from gyre.harness.formats import MARKERS
from gyre.harness.task import TasksError
from gyre.harness.tasks import load_bundled, load_tasks
from gyre.job.broken import Broken, broken
from gyre.job.decode import Fault, shown
from gyre.job.engines import engine_faults
from gyre.job.evaluation import evaluation_faults, evaluation_warnings
from gyre.job.harnesses import harness_faults
from gyre.job.named import Kind, named_faults
from gyre.job.tables import Job

_MOST = 2**53
_ABOVE_ZERO = (0, False, _MOST)
_NOT_NEGATIVE = (0, True, _MOST)
_ONE_OR_MORE = (1, True, _MOST)
_TWO_OR_MORE = (2, True, _MOST)
_PORT = (0, True, 65535)

BOUNDS: dict[str, tuple[float, bool, float]] = {
    "seed": _NOT_NEGATIVE,
    "model.context_tokens": _TWO_OR_MORE,
    "model.warm_start.steps": _ONE_OR_MORE,
    "model.warm_start.batch": _ONE_OR_MORE,
    "model.warm_start.lr": _ABOVE_ZERO,
    "cluster.threads_per_rank": _ONE_OR_MORE,
    "cluster.nodes": _NOT_NEGATIVE,
    "cells.cells": _TWO_OR_MORE,
    "cells.ranks": _ONE_OR_MORE,
    "cells.capacity_executions": _ONE_OR_MORE,
    "cells.group_timeout_s": _ABOVE_ZERO,
    "schedule.burst_steps": _ONE_OR_MORE,
    "schedule.lead_steps": _NOT_NEGATIVE,
    "schedule.call_back": _NOT_NEGATIVE,
    "rollout.temperature": _ABOVE_ZERO,
    "rollout.top_p": (0, False, 1),
    "rollout.top_k": _NOT_NEGATIVE,
    "rollout.max_new_tokens": _ONE_OR_MORE,
    "rollout.kv_tokens": _ONE_OR_MORE,
    "rollout.block_tokens": _ONE_OR_MORE,
    "rollout.kv_rest_bytes": _NOT_NEGATIVE,
    "rollout.max_batch": _ONE_OR_MORE,
    "rollout.chunk_interval_s": _NOT_NEGATIVE,
    "rollout.sglang.start_timeout_s": _ABOVE_ZERO,
    "rollout.sglang.mem_fraction_static": (0, False, 1),
    "rollout.sglang.kv_storage_bytes": _NOT_NEGATIVE,
    "harness.timeout_s": _ABOVE_ZERO,
    "harness.overall_timeout_s": _ABOVE_ZERO,
    "harness.attempts": _ONE_OR_MORE,
    "harness.refills": _NOT_NEGATIVE,
    "harness.concurrent": _ONE_OR_MORE,
    "harness.max_workspace_bytes": _ONE_OR_MORE,
    "harness.compact_tokens": _NOT_NEGATIVE,
    # Less than these and no Python starts.
    "harness.limits.memory_bytes": (1 << 26, True, _MOST),
    "harness.limits.processes": (4, True, _MOST),
    "harness.limits.threads": (4, True, _MOST),
    "harness.limits.disk_bytes": _ONE_OR_MORE,
    "harness.max_compactions": _NOT_NEGATIVE,
    "harness.proxy.port": _PORT,
    "harness.proxy.wait_s": _ABOVE_ZERO,
    "harness.proxy.keep_alive_s": _ABOVE_ZERO,
    "harness.proxy.kv_budget_s": (0, True, 60),
    "harness.proxy.max_body_bytes": _ONE_OR_MORE,
    "tasks.count": _ONE_OR_MORE,
    "tasks.seed": _NOT_NEGATIVE,
    **{
        f"{table}.{key}": bounds
        for table in ("evaluator", "evaluator.mix.*")
        for key, bounds in {
            "timeout_s": _ABOVE_ZERO,
            "attempts": _ONE_OR_MORE,
            "pytest.test_timeout_s": _ABOVE_ZERO,
            "judge.max_chars": _ONE_OR_MORE,
            "judge.max_tokens": _ONE_OR_MORE,
            "judge.temperature": _NOT_NEGATIVE,
        }.items()
    },
    "evaluator.mix.*.weight": _ABOVE_ZERO,
    "eval.every_steps": _NOT_NEGATIVE,
    "eval.count": _ONE_OR_MORE,
    "eval.seed": _NOT_NEGATIVE,
    "eval.runs": _ONE_OR_MORE,
    "train.steps": _ONE_OR_MORE,
    "train.groups_per_step": _ONE_OR_MORE,
    "train.group_size": _TWO_OR_MORE,
    "train.lr": _NOT_NEGATIVE,
    "train.warmup_steps": _NOT_NEGATIVE,
    "train.eps": _ABOVE_ZERO,
    "train.weight_decay": _NOT_NEGATIVE,
    "train.max_grad_norm": _ABOVE_ZERO,
    "train.micro_step_tokens": _ONE_OR_MORE,
    "train.lease_s": _ABOVE_ZERO,
    "loss.clip_low": _NOT_NEGATIVE,
    "loss.clip_high": _NOT_NEGATIVE,
    "sampling.max_trajectories": _ONE_OR_MORE,
    "sampling.max_staleness": _NOT_NEGATIVE,
    "sampling.seed": _NOT_NEGATIVE,
    "checkpoint.every_steps": _ONE_OR_MORE,
    "checkpoint.keep": _ONE_OR_MORE,
    "watch.prometheus_port": _PORT,
    "watch.refresh_s": _ABOVE_ZERO,
}
"""Least value, whether it is itself allowed, greatest value."""

_WHY = {
    "cells.cells": " (the core and at least one satellite)",
    "train.group_size": " (advantages are relative to the other executions of the group)",
    "rollout.temperature": " (at 0 the executions of a group would be the same)",
}


def broken_rules(job: Job) -> Iterator[Broken]:
    """Everything that makes the job impossible. Reads the file system, imports nothing."""
    yield from _out_of_bounds(job)
    yield from _texts(job)
    yield from _cluster(job)
    yield from _sources(job)
    yield from _tokens(job)
    yield from engine_faults(job)
    yield from harness_faults(job)
    yield from evaluation_faults(job)


def warnings(job: Job) -> tuple[Fault, ...]:
    """What can be run but is probably not meant."""
    found = []
    for key in ("loss.clip_low", "loss.clip_high"):
        if (value := _at(job, key)) >= 0.2:
            found.append(
                Fault(
                    key=key,
                    found=shown(value),
                    allowed="GSPO's ratio is that of a whole sequence: ranges near 3e-4 clip at all, "
                    "0.2 is a range for single tokens",
                )
            )
    dispatched = (job.schedule.lead_steps + job.schedule.burst_steps) * job.train.groups_per_step
    if job.harness.here and dispatched * job.train.group_size > job.harness.concurrent:
        found.append(
            Fault(
                key="harness.concurrent",
                found=shown(job.harness.concurrent),
                allowed=f"{dispatched * job.train.group_size} are dispatched at a burst's boundary, "
                "the others wait for a place",
            )
        )
    tables = ["harness"] if job.harness.actor is None else []
    if any(scorer.judge is None for _, scorer in scorers(job.evaluator)):
        tables.append("evaluator")
    sandboxed = [table for table in tables if _at(job, f"{table}.sandbox") == "bubblewrap"]
    if sandboxed and shutil.which("bwrap") is None:
        key = f"{sandboxed[0]}.sandbox"
        found.append(Fault(key=key, found="no bwrap on this machine", allowed="bubblewrap, installed"))
    return (*found, *evaluation_warnings(job))


def _at(table: Any, key: str) -> Any:
    value: Any = table
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _all_at(job: Job, pattern: str) -> Iterator[tuple[str, Any]]:
    """The values of a key, which are several where it is in a table of tables (`*`)."""
    table, star, key = pattern.partition(".*.")
    if not star:
        yield pattern, _at(job, pattern)
        return
    for name, inner in _at(job, table).items():
        yield f"{table}.{name}.{key}", _at(inner, key)


def _out_of_bounds(job: Job) -> Iterator[Broken]:
    for pattern, (least, inclusive, most) in BOUNDS.items():
        for key, value in _all_at(job, pattern):
            # Written so that NaN is out of bounds.
            if value is None or ((value >= least if inclusive else value > least) and value <= most):
                continue
            words = f"{least} or more" if inclusive else f"more than {least}"
            if most < _MOST or value > most:
                words += f", at most {most}"
            yield broken(shown(value), words + _WHY.get(pattern, ""), key)
    if not all(0 <= beta < 1 for beta in job.train.betas):
        yield broken(shown(list(job.train.betas)), "two numbers in [0, 1)", "train.betas")


def _texts(job: Job) -> Iterator[Broken]:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", job.name):
        yield broken(shown(job.name), "letters, digits, '.', '_' and '-': it names a folder", "name")
    if not _may_be_folder(job.run_dir):
        found = f"{job.run_dir} is no folder"
        yield broken(found, "a folder, or a path that does not exist", "run_dir")
    if not job.harness.proxy.host:
        yield broken(shown(""), "an address to listen on", "harness.proxy.host")


def _cluster(job: Job) -> Iterator[Broken]:
    listen = job.cluster.listen
    if listen is None:
        if job.cluster.nodes > 0:
            yield broken("missing", "with cluster.nodes, ADDRESS:PORT", "cluster.listen", "cluster.nodes")
        return
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        yield broken(shown(listen), "ADDRESS:PORT", "cluster.listen")
    elif host in ("0.0.0.0", "[::]", "::", "*"):
        yield broken(shown(listen), "an address of this machine that the others reach", "cluster.listen")


def _sources(job: Job) -> Iterator[Broken]:
    yield from _one_source("model", job.model.path, job.model.recipe, "config.json")
    yield from _tasks("tasks", job.tasks)
    if job.eval.every_steps > 0 or job.eval.path or job.eval.recipe or job.eval.bundled:
        yield from _tasks("eval", job.eval)
    if job.model.warm_start is not None:
        yield from _named("model.warm_start.demos", job.model.warm_start.demos, "function")


def _one_source(table: str, path: Path | None, recipe: str | None, *holds: str) -> Iterator[Broken]:
    keys = (f"{table}.path", f"{table}.recipe")
    words = " or ".join(holds)
    if path is None and recipe is None:
        yield broken(f"neither {table}.path nor {table}.recipe", "one of the two", *keys)
    elif path is not None and recipe is not None:
        yield broken(f"both {table}.path and {table}.recipe", "one of the two", *keys)
    if path is not None and not _is_folder(path):
        yield broken(f"no folder {path}", f"a folder with {words}", keys[0])
    elif path is not None and not any(next(path.glob(name), None) for name in holds):
        yield broken(f"no {holds[0]} in {path}", f"a folder with {words}", keys[0])
    if recipe is not None:
        yield from _named(keys[1], recipe, "function")


def _tasks(table: str, source: TasksConfig | EvalConfig) -> Iterator[Broken]:
    if source.bundled:
        for key in ("path", "recipe"):
            if getattr(source, key) is not None:
                found = f"both {table}.bundled and {table}.{key}"
                yield broken(found, "one of the two", f"{table}.bundled", f"{table}.{key}")
    else:
        faults = list(_one_source(table, source.path, source.recipe, *(f"*/{name}" for name in MARKERS)))
        yield from faults
        if faults:
            return
    try:
        load_bundled(source.bundled)
        if source.path is not None and not source.bundled:
            load_tasks(source.path)
    except TasksError as error:
        key = "bundled" if source.bundled else "path"
        yield broken(f"{error.place}: {error.problem}", error.fix, f"{table}.{key}")


def _may_be_folder(path: Path) -> bool:
    try:
        return not path.exists() or path.is_dir()
    except OSError:  # no permission, too long a name
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # no permission, too long a name
        return False


def _named(key: str, name: str, kind: Kind) -> Iterator[Broken]:
    # Of a function's package nothing is asked until it is called.
    for fault in named_faults(key, name, kind, in_package=kind == "class"):
        yield frozenset([key]), fault


def _tokens(job: Job) -> Iterator[Broken]:
    context = job.model.context_tokens
    if job.rollout.max_new_tokens >= context:
        yield broken(
            shown(job.rollout.max_new_tokens),
            f"less than model.context_tokens = {context}, so that a prompt has room",
            "rollout.max_new_tokens",
            "model.context_tokens",
        )
    for key in ("train.micro_step_tokens", "rollout.kv_tokens"):
        if (value := _at(job, key)) < context:
            yield broken(
                shown(value),
                f"at least model.context_tokens = {context}, so that the longest trajectory fits",
                key,
                "model.context_tokens",
            )
    if job.rollout.block_tokens > 0 and job.rollout.kv_tokens % job.rollout.block_tokens:
        yield broken(
            shown(job.rollout.kv_tokens),
            f"a multiple of rollout.block_tokens = {job.rollout.block_tokens}",
            "rollout.kv_tokens",
            "rollout.block_tokens",
        )
