"""What a job's rollout engine must satisfy."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import urlsplit

from gyre.cell.engine.base import divides
from gyre.job.broken import Broken, broken
from gyre.job.decode import shown
from gyre.job.tables import Job


def engine_faults(job: Job) -> Iterator[Broken]:
    """Looks for interpreters and packages, starts and imports nothing."""
    rollout = job.rollout
    if rollout.engine == "native" and rollout.parallel == "tensor":
        yield from _divided(job)
    if rollout.engine == "sglang":
        if rollout.sglang.server_url is None:
            yield from _started(job)
        else:
            yield from _attached(job, rollout.sglang.server_url)
        if rollout.batch_invariant:
            allowed = "false: SGLang has --enable-deterministic-inference, for rollout.sglang.arguments"
            yield broken(shown(True), allowed, "rollout.batch_invariant", "rollout.engine")
        if rollout.on_publish == "keep":
            allowed = "'recompute': SGLang's prefix cache knows no sessions, others would find the old KV"
            yield broken(shown("keep"), allowed, "rollout.on_publish", "rollout.engine")
        if rollout.kv_rest_bytes:
            allowed = "0: SGLang gives no KV away"
            yield broken(shown(rollout.kv_rest_bytes), allowed, "rollout.kv_rest_bytes", "rollout.engine")
        if rollout.sglang.weights_by == "ipc" and job.cluster.device == "cpu":
            allowed = "with cluster.device = 'cpu' another way, or 'auto': only GPU memory is shared so"
            yield broken(shown("ipc"), allowed, "rollout.sglang.weights_by", "cluster.device")
        yield from _kept(job)


def _divided(job: Job) -> Iterator[Broken]:
    """Where the folder tells of its heads; a recipe's are known when it has run."""
    ranks, folder = job.cells.ranks, job.model.path
    heads = None if folder is None else _heads(folder)
    if heads is not None and not divides(*heads, ranks):
        found = f"'tensor' over {ranks} ranks of a model of {heads[0]} heads and {heads[1]} KV heads"
        allowed = "heads that are a multiple of the ranks, KV heads too or a divisor of them; or 'data'"
        yield broken(found, allowed, "rollout.parallel", "rollout.engine", "cells.ranks", "model.path")


def _heads(folder: Path) -> tuple[int, int] | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    both = (heads, kv_heads)
    return both if all(isinstance(one, int) and one > 0 for one in both) else None


def _started(job: Job) -> Iterator[Broken]:
    sglang = job.rollout.sglang
    key = "rollout.sglang.python"
    allowed = "the interpreter of an environment that SGLang is in; or rollout.sglang.server_url"
    if sglang.python is None:
        if PathFinder.find_spec("sglang") is None:
            yield broken("no SGLang in this environment", allowed, key)
    elif not (sglang.python.is_file() and os.access(sglang.python, os.X_OK)):
        yield broken(f"no program {sglang.python}", allowed, key)
    if any("\0" in word for word in sglang.arguments):
        yield broken(
            shown(list(sglang.arguments)), "words without NUL characters", "rollout.sglang.arguments"
        )
    for name, value in sglang.environment.items():
        if not name or "=" in name or "\0" in name + value:
            legal = "names without '=', nothing with NUL characters"
            yield broken(shown(f"{name}={value}"), legal, "rollout.sglang.environment")


def _kept(job: Job) -> Iterator[Broken]:
    key, sglang = "rollout.sglang.kv_storage_bytes", job.rollout.sglang
    if sglang.kv_storage_bytes and sglang.server_url is not None:
        allowed = "0: a server is told when it starts where to keep KV"
        yield broken(shown(sglang.kv_storage_bytes), allowed, key, "rollout.sglang.server_url")
    if sglang.kv_storage_bytes and job.rollout.parallel == "tensor" and job.cells.ranks > 1:
        allowed = "0: only servers of one GPU keep KV"
        yield broken(shown(sglang.kv_storage_bytes), allowed, key, "rollout.parallel", "cells.ranks")


def _attached(job: Job, url: str) -> Iterator[Broken]:
    key = "rollout.sglang.server_url"
    wanted = "http://HOST:PORT, in which {cell} and {rank} are replaced"
    names = _placeholders(url)
    if names is None or not names <= {"cell", "rank"} or not _is_server(url.format(cell=0, rank=0)):
        yield broken(shown(url), wanted, key)
        return
    if "cell" not in names:
        yield broken(shown(url), "a URL with {cell} in it: each cell has a server of its own", key)
    if job.rollout.parallel == "data" and job.cells.ranks > 1 and "rank" not in names:
        allowed = "a URL with {rank} in it: each rank has a server of its own, or rollout.parallel = 'tensor'"
        yield broken(shown(url), allowed, key, "cells.ranks", "rollout.parallel")
    for field in ("python", "arguments", "environment"):
        if getattr(job.rollout.sglang, field):
            yield broken(
                f"{field} beside a server that runs already",
                "nothing beside rollout.sglang.server_url",
                f"rollout.sglang.{field}",
                key,
            )


def _placeholders(url: str) -> set[str] | None:
    """The names in braces; None where braces do not match or hold more than a name."""
    try:
        parsed = list(string.Formatter().parse(url))
    except ValueError:
        return None
    if any(spec or conversion for _, _, spec, conversion in parsed):
        return None
    return {name for _, name, _, _ in parsed if name is not None}


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, or brackets that do not match
        return False
