"""The five harnesses as a job names them, from the folder that they are installed in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gyre.harness.config import HarnessConfig, PresetName

FOLDER = Path(os.environ.get("GYRE_TEST_HARNESSES") or "/nowhere").resolve()
BIN = FOLDER / "node_modules" / ".bin"
MODEL = "policy"


@dataclass(frozen=True, kw_only=True)
class Harness:
    """`program` None: it is beside this Python. `prompt_tokens`: its first prompt has about so many."""

    name: PresetName
    program: Path | None
    prompt_tokens: int = 0

    def config(self, *, compact_tokens: int = 0, timeout_s: float = 300.0) -> HarnessConfig:
        return HarnessConfig(
            preset=self.name,
            program=self.program,
            compact_tokens=compact_tokens,
            timeout_s=timeout_s,
            overall_timeout_s=timeout_s + 60.0,
            attempts=1,
            refills=0,
            keep=True,
        )


CLAUDE_CODE = Harness(name="claude-code", program=BIN / "claude", prompt_tokens=26_000)
CODEX = Harness(name="codex", program=BIN / "codex", prompt_tokens=12_000)
QWEN_CODE = Harness(name="qwen-code", program=BIN / "qwen", prompt_tokens=24_500)
OPENCODE = Harness(name="opencode", program=BIN / "opencode", prompt_tokens=9_500)
MINI = Harness(name="mini-swe-agent", program=None)

HARNESSES = (CLAUDE_CODE, CODEX, QWEN_CODE, OPENCODE, MINI)
