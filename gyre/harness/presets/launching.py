"""From a job's `[harness]` to how its executions start, and the files that their harness finds at home."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from gyre.harness.commands import check_program, fill, named_files
from gyre.harness.config import HarnessConfig
from gyre.harness.presets import claude_code, codex, mini_swe_agent, opencode, qwen_code
from gyre.harness.presets.installed import Installed, installed
from gyre.harness.presets.preset import Launch, Preset, Terms
from gyre.proxy.messages import CompactionLimit

PRESETS: dict[str, Preset] = {
    module.PRESET.name: module.PRESET for module in (claude_code, codex, qwen_code, opencode, mini_swe_agent)
}
# Of what a prompt may have: tool results that come after the last count must find room, and the summary.
COMPACT_PART = 0.75


def launch_of(config: HarnessConfig, window_tokens: int, max_new_tokens: int) -> Launch:
    """How a command or a preset of the job is started; `window_tokens` bound a prompt and its answer.
    Blocking: runs a preset's program for its version. Raises ProgramMissing, PresetMissing."""
    preset = PRESETS.get(config.preset)
    found = find_preset(config)
    if preset is None or found is None:
        check_program("harness.command", config.command)
        mounts = named_files(config.command)
        return Launch(command=config.command, environment=config.environment, mounts=mounts)
    terms = Terms(
        max_new_tokens=max_new_tokens,
        compact_tokens=compact_tokens(config, window_tokens, max_new_tokens),
        timeout_s=config.timeout_s,
        arguments=config.arguments,
    )
    launch = preset.launch(found.program, terms)
    return msgspec.structs.replace(
        launch,
        environment={"PATH": found.path, **launch.environment, **config.environment},
        mounts=(*found.mounts, *named_files(config.arguments)),
    )


def find_preset(config: HarnessConfig) -> Installed | None:
    """The program of the job's preset, None where it has none. Blocking, as `installed`. Raises
    PresetMissing."""
    preset = PRESETS.get(config.preset)
    return None if preset is None else installed(preset, config.program, config.version)


def compact_tokens(config: HarnessConfig, window_tokens: int, max_new_tokens: int) -> int:
    """Where a preset compacts, by the job or else by the room for prompts."""
    return config.compact_tokens or max(1, int(COMPACT_PART * (window_tokens - max_new_tokens)))


def compaction_limit(config: HarnessConfig) -> CompactionLimit | None:
    """For the proxy; None where it cannot tell a request for a summary."""
    preset = PRESETS.get(config.preset)
    if preset is None or not preset.summarises:
        return None
    return CompactionLimit(most=config.max_compactions, words=preset.summarises)


def write_files(launch: Launch, home: Path, values: Mapping[str, str]) -> None:
    """Blocking. Raises OSError."""
    for name, content in launch.files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_ENCODE[path.suffix](_filled(content, values)))


def _filled(content: Any, values: Mapping[str, str]) -> Any:
    if isinstance(content, str):
        return fill([content], values)[0]
    if isinstance(content, Mapping):
        return {_filled(key, values): _filled(value, values) for key, value in content.items()}
    return content


def _toml(content: dict[str, Any]) -> bytes:
    return tomli_w.dumps(content).encode()


_ENCODE: dict[str, Callable[[dict[str, Any]], bytes]] = {
    ".toml": _toml,
    ".json": msgspec.json.encode,
    # JSON is YAML.
    ".yaml": msgspec.json.encode,
}
