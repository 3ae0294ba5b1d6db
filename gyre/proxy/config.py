"""The job file's keys about the proxy: they stand in `[harness.proxy]`."""

from __future__ import annotations

from typing import Literal

import msgspec

ToolFormatName = Literal["hermes", "qwen3_coder", "llama", "smollm2", "plain"]


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`port` 0 takes a free one. A call waits up to `wait_s` for a cell before it fails with 503; while it
    waits, a streamed answer carries a comment or a ping every `keep_alive_s`. `tool_format` is how the
    policy writes tool calls; `plain`: it has no tools. When a cell leaves rollout KV is moved for up to
    `kv_budget_s`; 0: never."""

    host: str = "127.0.0.1"
    port: int = 0
    wait_s: float = 600.0
    max_body_bytes: int = 16 * 1024 * 1024
    tool_format: ToolFormatName = "hermes"
    keep_alive_s: float = 10.0
    kv_budget_s: float = 2.0
