"""The job file's tables about tasks, harnesses and evaluators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from gyre.proxy.config import ProxyConfig

PresetName = Literal["custom", "claude-code", "codex", "qwen-code", "opencode", "mini-swe-agent"]


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be used in a bubblewrap sandbox, an evaluator's too. Where it is more, all that runs there is
    killed, as if it had exited with code 137, and the execution's detail says which limit it was.
    `memory_bytes` are those of all its processes together, what they share counted once; `disk_bytes` those
    of the workspace, the home folder and /tmp together."""

    memory_bytes: int = 8 << 30
    processes: int = 1024
    threads: int = 2048
    disk_bytes: int = 8 << 30


class HarnessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command, a known harness, or a user's actor.

    `{python}`, `{workspace}`, `{home}`, `{prompt_file}`, `{prompt}` (its text), `{base_url}`, `{key}`,
    `{model}` (the policy's name) and `{task}` (its name) in a command and in `environment` are replaced; its
    environment carries OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY,
    GYRE_PROMPT_FILE, GYRE_MODEL, GYRE_TASK and GYRE_EXECUTION. Files that the command names by an absolute
    path, and `read_only` paths, are visible in a bubblewrap sandbox.

    `preset` names a known harness (gyre.harness.presets) in place of a command. Its `program` is looked for
    by its name, and is of a tested version or of `version`; `arguments` and `environment` are added to those
    of the preset. It compacts at `compact_tokens`, 0: three quarters of the room for prompts; who has
    compacted `max_compactions` times and wants to once more is refused from then on.

    `actor` is a `gyre.harness.Harness` named `package.module:Class` or `file.py:Class`, built from `options`.
    It has no sandbox, and lives in this process or, with `own_process`, in one of its own, which
    `environment` is for then.

    With `here` false executions of a command or a preset are played only on machines that join for it; else
    on these first.

    `attempts` are those at getting it to run, without those that ended with their machine, `refills` how
    often what was dropped is played anew.

    `timeout_s` is the harness's own (what it left is still scored), `overall_timeout_s` drops the
    execution. A workspace larger than `max_workspace_bytes` scores 0. `keep` leaves workspaces in the
    run folder. `limits` are those of a sandbox. `proxy` is what the harness talks to."""

    preset: PresetName = "custom"
    program: Path | None = None
    version: str = ""
    arguments: tuple[str, ...] = ()
    compact_tokens: int = 0
    max_compactions: int = 32
    command: tuple[str, ...] = ()
    actor: str | None = None
    options: dict[str, Any] = {}
    own_process: bool = False
    environment: dict[str, str] = {}
    sandbox: Literal["bubblewrap", "process"] = "bubblewrap"
    read_only: tuple[Path, ...] = ()
    here: bool = True
    timeout_s: float = 600.0
    overall_timeout_s: float = 3600.0
    attempts: int = 3
    refills: int = 1
    concurrent: int = 64
    max_workspace_bytes: int = 1 << 30
    limits: LimitsConfig = LimitsConfig()
    keep: bool = False
    proxy: ProxyConfig = ProxyConfig()


class TasksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Training tasks: a folder of task folders (`prompt.md`, and `workspace/` where work begins with
    files; or those of another format), names of tasks that come with Gyre (or "all"), or a function
    `(folder, count, seed)` that writes them into the run folder. Drawn in seeded order, again when
    exhausted."""

    path: Path | None = None
    bundled: tuple[str, ...] = ()
    recipe: str | None = None
    count: int = 64
    seed: int = 0


class PytestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tests that the harness never saw: the folder `tests` of the task's. They are run by this Python's
    pytest against a copy of the workspace, which with its `src` comes first on their path. Nothing of the
    workspace configures pytest; `plugins` are modules that they need. A test that takes longer than
    `test_timeout_s`, or ends its process, did not pass, and the others go on."""

    tests: Path = Path("tests")
    plugins: tuple[str, ...] = ()
    test_timeout_s: float = 30.0


class JudgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that reads the task's prompt, the file `rubric` and the workspace's text files that match
    `files`, up to `max_chars` characters, and says a score. `base_url` is that of an OpenAI-compatible
    endpoint, `/v1` included; `api_key_env` names the variable of the job's environment that has its key."""

    base_url: str
    model: str
    rubric: Path
    api_key_env: str = ""
    files: tuple[str, ...] = ("*",)
    max_chars: int = 100_000
    max_tokens: int = 2048
    temperature: float = 0.0


class ScorerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `command`, `pytest`, `judge`, `function` and `own`; `timeout_s` is that of one attempt."""

    command: tuple[str, ...] = ()
    junit: bool = False
    pytest: PytestConfig | None = None
    judge: JudgeConfig | None = None
    function: str | None = None
    own: bool = False
    timeout_s: float = 60.0
    attempts: int = 3


class PartConfig(ScorerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the evaluators of a mix."""

    weight: float = 1.0


class EvaluatorConfig(ScorerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scores a copy of the workspace that is left. A failed evaluation is not a zero: it is tried again, then
    the execution is dropped.

    A `command` prints a score in [0, 1] as its last line, or (`junit`) writes JUnit XML to `{report}`, scored
    passed / total. `{workspace}`, `{task}` (the task's folder), `{report}` and `{python}` are replaced.
    `function`, named `file.py:function` or `package.module:function`, takes two paths, the workspace and the
    task's folder, and returns a score. With `own` it is each task's own: the hidden tests in its folder
    `tests`, or what its format brings; a time-out that it brings holds in place of `timeout_s`. `mix` has
    evaluators by name: the score is their weighted mean, and one that fails fails all. In a bubblewrap
    sandbox commands, tests and functions have no network."""

    sandbox: Literal["bubblewrap", "process"] = "bubblewrap"
    mix: dict[str, PartConfig] = {}


def scorers(config: EvaluatorConfig) -> Iterator[tuple[str, ScorerConfig]]:
    """The tables that score, by their place in a job file."""
    if not config.mix:
        yield "evaluator", config
    for name, part in config.mix.items():
        yield f"evaluator.mix.{name}", part


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out tasks, each run `runs` times every `every_steps` steps and at the start and the end, on one
    pinned version, never trained. Same sources as `[tasks]`."""

    every_steps: int = 0
    path: Path | None = None
    bundled: tuple[str, ...] = ()
    recipe: str | None = None
    count: int = 16
    seed: int = 1
    runs: int = 1
