"""Keys of `[harness]` that go together, and what is said where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gyre.cli import app
from gyre.harness.presets import PRESETS
from gyre.job import JobError, load_job, warnings
from gyre.job.harnesses import OF_PRESETS
from tests.harness.presets.programs import telling
from tests.job.conftest import JOB, Faults

LONG = (
    "model.context_tokens=131072",
    "rollout.max_new_tokens=4096",
    "rollout.kv_tokens=1048576",
    "train.micro_step_tokens=131072",
)


def preset(name: str, *overrides: str) -> list[str]:
    return ["harness.command=", f"harness.preset={name}", *LONG, *overrides]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_stands_in_place_of_a_command(name: str, job_file: Path) -> None:
    job = load_job(job_file, preset(name, "harness.program=bin/it", "harness.arguments=['{job_dir}/x']"))
    assert job.harness.preset == name
    assert job.harness.program == job_file.parent / "bin" / "it"
    assert job.harness.arguments == (f"{job_file.parent}/x",)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["harness.preset=claude"], "harness.preset", "did you mean claude-code?"),
        (["harness.preset=codex", *LONG], "harness.command", "nothing beside the preset codex"),
        (["harness.program=/bin/sh"], "harness.program", "program without a preset"),
        (["harness.version=2.0.1"], "harness.version", "version without a preset"),
        (["harness.arguments=['-v']"], "harness.arguments", "arguments without a preset"),
        (["harness.compact_tokens=9"], "harness.compact_tokens", "compact_tokens without a preset"),
        (["harness.max_compactions=9"], "harness.max_compactions", "max_compactions without a preset"),
        (preset("codex", "harness.max_compactions=-1"), "harness.max_compactions", "0 or more"),
        (preset("codex", "harness.compact_tokens=-1"), "harness.compact_tokens", "0 or more"),
        (preset("codex", "harness.compact_tokens=127000"), "harness.compact_tokens", "at most 126976"),
        (preset("codex", "harness.compact_tokens=10"), "harness.compact_tokens", "about 9000 tokens long"),
        (preset("codex", "model.context_tokens=8192"), "model.context_tokens", "about 9000 tokens long"),
        (preset("opencode", "harness.proxy.tool_format=plain"), "harness.proxy.tool_format", "with tools"),
        (preset("opencode", 'harness.arguments=["a\\u0000"]'), "harness.arguments", "without NUL"),
        (
            preset("mini-swe-agent", "harness.max_compactions=3"),
            "harness.max_compactions",
            "does not compact",
        ),
        (preset("mini-swe-agent", "harness.compact_tokens=30000"), "harness.compact_tokens", "does not comp"),
        (preset("opencode", "harness.versions=2"), "harness.versions", "did you mean harness.version?"),
        (["harness.here=false"], "harness.here", "with cluster.listen"),
        (preset("codex", "harness.actor=x.py:X"), "harness.preset", "nothing beside harness.actor"),
    ],
)
def test_what_does_not_go_together_is_named(
    overrides: list[str], key: str, words: str, faults: Faults
) -> None:
    assert words in faults(*overrides)[key]


values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.text(max_size=8), st.lists(st.text(max_size=4))
).filter(lambda value: value is not None)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.one_of(st.sampled_from(["custom", *PRESETS]), st.text(max_size=12)),
    table=st.dictionaries(
        st.sampled_from([*OF_PRESETS, "command", "environment"]),
        values,
        max_size=3,
    ),
)
def test_any_table_is_a_job_or_has_faults_that_name_its_keys(
    name: str, table: dict[str, object], job_file: Path
) -> None:
    path = job_file.parent / "any.toml"
    rest = JOB.partition("[harness]")[0] + JOB[JOB.index("[tasks]") :]
    path.write_text(f"{rest}\n{tomli_w.dumps({'harness': {'preset': name, **table}})}", encoding="utf-8")
    try:
        job = load_job(path, LONG)
    except JobError as error:
        keys = {fault.key.partition(".")[0] for fault in error.faults}
        assert keys == {"harness"}
    else:
        assert (job.harness.preset == "custom") == bool(job.harness.command)


def test_how_many_are_played_here_does_not_matter_where_none_are(job_file: Path) -> None:
    few = ["harness.concurrent=1", "cluster.listen=127.0.0.1:0"]
    assert "harness.concurrent" in {fault.key for fault in warnings(load_job(job_file, few))}
    elsewhere = load_job(job_file, [*few, "harness.here=false"])
    assert "harness.concurrent" not in {fault.key for fault in warnings(elsewhere)}


def test_check_says_what_is_not_installed(job_file: Path, tmp_path: Path) -> None:
    program = telling(tmp_path / "codex", "codex-cli 0.1.0")
    given = preset("codex", f"harness.program={program}")
    words = [word for override in given for word in ("--set", override)]
    result = CliRunner().invoke(app, ["check", str(job_file), *words])
    assert result.exit_code == 0
    assert f"warning: harness.preset: {program} is version 0.1.0, wanted is" in result.stderr
