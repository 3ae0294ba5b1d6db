"""What a job came to, for people and for scripts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`reward_first` and `reward_last` are of the first and the last evaluation on held-out tasks (None
    where the job has no evaluation). `compactions`, `sub_agents` and `retries` are counted from the
    trajectory trees, `satellite_micro_steps` from committed contributions. `checkpoint` is a folder. Of
    sessions whose cell left rollout KV was moved, or is computed again. Of the tokens sampled for complete
    groups `excluded_tokens` are not trained, by reason; `groups_without_signal` had equal scores.
    `tool_calls` are the well-formed ones."""

    name: str
    steps: int
    seconds: float
    reward_first: float | None
    reward_last: float | None
    role_changes: int
    role_changes_with_calls_in_flight: int
    satellite_micro_steps: int
    failed_calls: int
    compactions: int
    sub_agents: int
    retries: int
    tool_calls: int = 0
    malformed_tool_calls: int = 0
    kv_sessions_moved: int = 0
    kv_sessions_recomputed: int = 0
    kv_sessions_rested: int = 0
    kv_bytes_moved: int = 0
    kv_move_s: float = 0.0
    trained_tokens: int = 0
    excluded_tokens: dict[str, int] = {}
    groups_without_signal: int = 0
    checkpoint: str | None


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Writes `run_dir`/summary.json whole or not at all, and the same as one line to stdout, also where
    the file cannot be written (then raises OSError)."""
    line = msgspec.json.encode(summary).decode()
    try:
        written = run_dir / "summary.json.new"
        written.write_text(line + "\n", encoding="utf-8")
        os.replace(written, run_dir / "summary.json")
    finally:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
