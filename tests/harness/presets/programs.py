"""Small programs that tell a version, as those of harnesses do."""

from __future__ import annotations

from pathlib import Path

SAYS = {
    "claude-code": "{} (Claude Code)",
    "codex": "codex-cli {}",
    "qwen-code": "{}",
    "opencode": "{}",
}


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    return path


def telling(path: Path, text: str) -> Path:
    """Answers --version, and nothing else."""
    return write_program(path, f'#!/bin/sh\n[ "$*" = --version ] && echo "{text}"\n')
