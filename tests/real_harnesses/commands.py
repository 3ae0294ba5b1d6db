"""How the five harnesses are run headless: their commands and environments, as a job file has them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gyre.harness.config import HarnessConfig

FOLDER = Path(os.environ.get("GYRE_TEST_HARNESSES") or "/nowhere").resolve()
BIN = FOLDER / "node_modules" / ".bin"
MODEL = "policy"


@dataclass(frozen=True, kw_only=True)
class Harness:
    """`compacting` are words, `compacting_environment` variables more with which it compacts early."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    compacting: tuple[str, ...] = ()
    compacting_environment: Mapping[str, str] = field(default_factory=dict)
    titles: int = 0

    def config(self, *, compacts: bool = False, timeout_s: float = 120.0) -> HarnessConfig:
        more = self.compacting if compacts else ()
        environment = {**self.environment, **(self.compacting_environment if compacts else {})}
        return HarnessConfig(
            command=(*self.command[:-1], *more, self.command[-1]),
            environment=environment,
            read_only=(FOLDER,),
            timeout_s=timeout_s,
            overall_timeout_s=timeout_s + 60.0,
            attempts=1,
            refills=0,
            keep=True,
        )


def _opencode(context: int) -> dict[str, str]:
    model = {"name": MODEL, "reasoning": True, "limit": {"context": context, "output": 8192}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "gyre",
        "options": {"baseURL": "{base_url}", "apiKey": "{key}"},
        "models": {MODEL: model},
    }
    settings = {"provider": {"gyre": provider}, "permission": {"bash": "allow", "edit": "allow"}}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}


_PROVIDER = "model_providers.gyre"

CLAUDE_CODE = Harness(
    name="claude-code",
    command=(
        str(BIN / "claude"), "--dangerously-skip-permissions", "--output-format", "json", "-p", "{prompt}",
    ),
    environment={
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
    },
    compacting_environment={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000"},
)  # fmt: skip
CODEX = Harness(
    name="codex",
    command=(
        str(BIN / "codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
        "--json",
        "-c", 'model_provider="gyre"', "-c", f'model="{MODEL}"', "-c", f'{_PROVIDER}.name="gyre"',
        "-c", f'{_PROVIDER}.base_url="{{base_url}}"', "-c", f'{_PROVIDER}.env_key="OPENAI_API_KEY"',
        "-c", f'{_PROVIDER}.wire_api="responses"', "{prompt}",
    ),
    compacting=("-c", "model_auto_compact_token_limit=30000"),
)  # fmt: skip
QWEN_CODE = Harness(
    name="qwen-code",
    command=(str(BIN / "qwen"), "--auth-type", "openai", "-y", "-p", "{prompt}"),
    environment={"OPENAI_MODEL": MODEL},
)
OPENCODE = Harness(
    name="opencode",
    command=(str(BIN / "opencode"), "run", "-m", f"gyre/{MODEL}", "{prompt}"),
    environment=_opencode(200_000),
    compacting_environment=_opencode(30_000),
    titles=1,
)
MINI = Harness(
    name="mini-swe-agent",
    command=(
        "{python}", "-m", "minisweagent.run.mini", "--yolo", "--exit-immediately", "--cost-limit", "0",
        "--model", f"openai/{MODEL}", "--task", "{prompt}",
    ),
    environment={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
)  # fmt: skip

HARNESSES = (CLAUDE_CODE, CODEX, QWEN_CODE, OPENCODE, MINI)
