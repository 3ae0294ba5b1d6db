"""The job file of a known harness."""

from __future__ import annotations

from pathlib import Path

from gyre.harness.presets import PRESETS, Terms, compact_tokens
from gyre.job import load_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "claude_code.toml"


def test_the_example_is_a_job_for_any_policy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    job = load_job(EXAMPLE, [f"model.path={tmp_path}"])
    harness, preset = job.harness, PRESETS[job.harness.preset]
    trigger = compact_tokens(harness, job.model.context_tokens, job.rollout.max_new_tokens)
    assert trigger == 90_000
    terms = Terms(
        max_new_tokens=job.rollout.max_new_tokens,
        compact_tokens=trigger,
        timeout_s=harness.timeout_s,
        arguments=harness.arguments,
    )
    assert preset.launch("claude", terms).command[-2:] == ("--disallowedTools", "Agent")
    assert preset.install in EXAMPLE.read_text()
