"""Harnesses that a job names instead of writing their command: how each is found, started headless, kept
quiet, and made to compact within the policy's context."""

from gyre.harness.presets.installed import PresetMissing
from gyre.harness.presets.launching import (
    PRESETS,
    compact_tokens,
    compaction_limit,
    find_preset,
    launch_of,
    write_files,
)
from gyre.harness.presets.preset import Launch, Preset, Terms

__all__ = [
    "PRESETS",
    "Launch",
    "Preset",
    "PresetMissing",
    "Terms",
    "compact_tokens",
    "compaction_limit",
    "find_preset",
    "launch_of",
    "write_files",
]
