"""codex, headless, over OpenAI Responses."""

from __future__ import annotations

from gyre.harness.presets.preset import Launch, Preset, Terms, reads_prompt

VERSION = "0.171.0"
RETRIES = 10


def launch(program: str, terms: Terms) -> Launch:
    flags = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")
    provider = {
        "name": "gyre",
        "base_url": "{base_url}",
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
        "supports_websockets": False,
        "request_max_retries": RETRIES,
        "stream_max_retries": RETRIES,
        "stream_idle_timeout_ms": terms.timeout_ms,
    }
    config = {
        "model": "{model}",
        "model_provider": "gyre",
        # It compacts at nine tenths of its window at the latest.
        "model_context_window": 2 * terms.compact_tokens,
        "model_auto_compact_token_limit": terms.compact_tokens,
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "history": {"persistence": "none"},
        "model_providers": {"gyre": provider},
    }
    return Launch(
        command=reads_prompt(program, *flags, *terms.arguments, "-"),
        files={".codex/config.toml": config},
    )


PRESET = Preset(
    name="codex",
    program="codex",
    version=VERSION,
    install=f"npm install -g @openai/codex@{VERSION}",
    launch=launch,
    own_tokens=9_000,
    summarises=("CONTEXT CHECKPOINT COMPACTION",),
)
