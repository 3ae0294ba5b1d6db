from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gyre.harness.commands import ProgramMissing, fill
from gyre.harness.config import HarnessConfig
from gyre.harness.presets import PRESETS, Launch, Terms, launch_of, write_files
from tests.harness.presets.programs import SAYS, telling

TERMS = Terms(max_new_tokens=4096, compact_tokens=60_000, timeout_s=900.5, arguments=("--more",))
VALUES = {
    "model": "policy",
    "base_url": "http://127.0.0.1:4181/v1",
    "key": "gyre-key",
    "task": "first",
    "prompt": 'say "{key}"\n\\ ü 𝄞',
    "home": "/home/agent",
}


def launch(name: str) -> Launch:
    return PRESETS[name].launch("/opt/program", TERMS)


def written(name: str, home: Path) -> Any:
    """The one configuration file of a preset, as its harness reads it."""
    write_files(launch(name), home, VALUES)
    (path,) = (path for path in home.rglob("*") if path.is_file())
    text = path.read_text(encoding="utf-8")
    return path.relative_to(home), tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)


def test_presets_are_those_that_a_job_may_name() -> None:
    named = HarnessConfig.__annotations__["preset"]
    assert named == "PresetName"
    from gyre.harness.config import PresetName

    assert {"custom", *PRESETS} == set(PresetName.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PRESETS)
def test_each_runs_its_program_headless_with_the_arguments_of_the_job(name: str) -> None:
    words = launch(name).command
    flags = {
        "claude-code": ("-p", "--dangerously-skip-permissions"),
        "codex": ("exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"),
        "qwen-code": ("--approval-mode", "yolo"),
        "opencode": ("run", "--auto"),
        "mini-swe-agent": ("-c", "mini.yaml", "{home}/gyre.yaml"),
    }[name]
    after = words[words.index("/opt/program") :]
    assert {*flags, "--more"} <= set(after)


@pytest.mark.parametrize("name", PRESETS)
def test_no_placeholder_is_left(name: str, tmp_path: Path) -> None:
    found = launch(name)
    _, config = written(name, tmp_path) if found.files else (None, None)
    filled = fill((*found.command, *found.environment.values()), VALUES)
    said = json.dumps([filled, {**config, "run": None} if config else None])
    assert not [hole for hole in ("{model}", "{base_url}", "{key}", "{home}", "{task}") if hole in said]
    assert not [word for word in filled if any(f"{{{value}}}" in word for value in VALUES)]


@pytest.mark.parametrize("name", ["claude-code", "codex", "qwen-code", "opencode"])
def test_a_prompt_longer_than_an_argument_may_be_is_read(name: str) -> None:
    assert launch(name).command[:3] == ("/bin/sh", "-c", 'exec "$@" < "$GYRE_PROMPT_FILE"')
    assert "{prompt}" not in launch(name).command


def test_claude_code_is_told_models_limits_and_to_be_quiet() -> None:
    environment = launch("claude-code").environment
    models = {value for key, value in environment.items() if key.endswith("_MODEL")}
    assert models == {"{model}"}
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "4096"
    assert environment["API_TIMEOUT_MS"] == "900500"
    # The sum of where it compacts, an answer, and what it always keeps free.
    windows = (environment[f"CLAUDE_CODE_{name}"] for name in ("MAX_CONTEXT_TOKENS", "AUTO_COMPACT_WINDOW"))
    assert set(windows) == {str(60_000 + 4096 + 13_000)}
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")
    assert {environment[key] for key in quiet} == {"1"}


def test_claude_code_keeps_no_more_than_20000_tokens_for_an_answer() -> None:
    long = PRESETS["claude-code"].launch(
        "claude", Terms(max_new_tokens=50_000, compact_tokens=100_000, timeout_s=1)
    )
    assert long.environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "133000"


def test_codex_knows_one_provider_and_asks_nobody(tmp_path: Path) -> None:
    path, config = written("codex", tmp_path)
    assert path == Path(".codex/config.toml")
    provider = config["model_providers"]["gyre"]
    assert (config["model"], config["model_provider"]) == ("policy", "gyre")
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:4181/v1", "responses")
    assert provider["stream_idle_timeout_ms"] == 900_500
    assert config["model_auto_compact_token_limit"] == 60_000
    assert config["model_context_window"] * 0.9 > 60_000
    assert (config["approval_policy"], config["sandbox_mode"]) == ("never", "danger-full-access")
    assert not any(config[part]["enabled"] for part in ("analytics", "feedback"))
    assert not config["check_for_update_on_startup"]


def test_qwen_code_compacts_at_a_part_of_its_window(tmp_path: Path) -> None:
    path, config = written("qwen-code", tmp_path)
    assert path == Path(".qwen/settings.json")
    generation, compression = config["model"]["generationConfig"], config["model"]["chatCompression"]
    assert generation["contextWindowSize"] * compression["contextPercentageThreshold"] == 60_000
    assert generation["timeout"] == 900_500
    assert not config["privacy"]["usageStatisticsEnabled"]
    assert not config["general"]["enableAutoUpdate"]
    assert launch("qwen-code").environment["OPENAI_MODEL"] == "{model}"


def test_opencode_compacts_where_an_answer_is_what_is_left(tmp_path: Path) -> None:
    path, config = written("opencode", tmp_path)
    assert path == Path(".config/opencode/opencode.json")
    provider = config["provider"]["gyre"]
    assert provider["models"]["policy"]["limit"] == {"context": 64_096, "output": 4096}
    assert provider["options"]["baseURL"] == "http://127.0.0.1:4181/v1"
    assert provider["options"]["apiKey"] == "gyre-key"
    assert (config["model"], config["small_model"]) == ("gyre/policy", "gyre/policy")
    assert (config["permission"], config["autoupdate"], config["share"]) == ("allow", False, "disabled")


def test_mini_swe_agent_has_its_task_in_a_file(tmp_path: Path) -> None:
    path, config = written("mini-swe-agent", tmp_path)
    assert path == Path("gyre.yaml")
    assert config["run"]["task"] == VALUES["prompt"]
    assert config["agent"]["agent_class"] == "default"
    assert config["model"]["model_name"] == "openai/policy"
    assert config["model"]["model_kwargs"]["max_tokens"] == 4096


@pytest.mark.parametrize("name", SAYS)
def test_what_the_job_says_comes_after_what_the_preset_says(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    program = telling(tmp_path / preset.program, SAYS[name].format(preset.version))
    rules = tmp_path / "rules.json"
    rules.touch()
    config = HarnessConfig(
        preset=name,  # type: ignore[arg-type]
        program=program,
        environment={"IS_SANDBOX": "0", "OWN": "{task}"},
        arguments=("--rules", str(rules)),
        compact_tokens=50_000,
    )
    found = launch_of(config, 131_072, 4096)
    assert (found.environment["IS_SANDBOX"], found.environment["OWN"]) == ("0", "{task}")
    assert [mount.host for mount in found.mounts] == [program, rules]
    assert str(program) in found.command


@pytest.mark.parametrize(("asked", "trigger"), [(0, 96_000), (50_000, 50_000)])
def test_it_compacts_at_three_quarters_of_the_room_or_where_the_job_says(
    asked: int, trigger: int, tmp_path: Path
) -> None:
    program = telling(tmp_path / "codex", f"codex-cli {PRESETS['codex'].version}")
    config = HarnessConfig(preset="codex", program=program, compact_tokens=asked)
    found = launch_of(config, 131_072, 3072)
    assert found.files[".codex/config.toml"]["model_auto_compact_token_limit"] == trigger


def test_a_command_is_started_as_it_is() -> None:
    config = HarnessConfig(command=("{python}", sys.executable), environment={"A": "{key}"})
    found = launch_of(config, 2048, 256)
    assert (found.command, found.environment, found.files) == (config.command, config.environment, {})
    assert [str(mount.host) for mount in found.mounts] == [sys.executable]
    with pytest.raises(ProgramMissing, match=r"harness\.command: cannot start 'no-such-harness'"):
        launch_of(HarnessConfig(command=("no-such-harness",)), 2048, 256)
