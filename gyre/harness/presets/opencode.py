"""opencode, headless, over OpenAI Chat Completions."""

from __future__ import annotations

from gyre.harness.presets.preset import Launch, Preset, Terms, reads_prompt

VERSION = "1.18.33"


def launch(program: str, terms: Terms) -> Launch:
    # A title of ours, or it asks the policy for one.
    flags = ("run", "--auto", "--pure", "--title", "{task}", "--format", "json")
    output = terms.max_new_tokens
    policy = {
        "name": "{model}",
        "reasoning": True,
        # It compacts where what is left of the context is not more than an answer.
        "limit": {"context": terms.compact_tokens + output, "output": output},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "gyre",
        "options": {"baseURL": "{base_url}", "apiKey": "{key}", "timeout": terms.timeout_ms},
        "models": {"{model}": policy},
    }
    config = {
        "model": "gyre/{model}",
        "small_model": "gyre/{model}",
        "enabled_providers": ["gyre"],
        "provider": {"gyre": provider},
        "permission": "allow",
        "autoupdate": False,
        "share": "disabled",
        "compaction": {"auto": True, "prune": False},
    }
    return Launch(
        command=reads_prompt(program, *flags, *terms.arguments),
        environment={
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "OPENCODE_DISABLE_EMBEDDED_WEB_UI": "1",
            "OPENCODE_DISABLE_TERMINAL_TITLE": "1",
        },
        files={".config/opencode/opencode.json": config},
    )


PRESET = Preset(
    name="opencode",
    program="opencode",
    version=VERSION,
    install=f"npm install -g opencode-ai@{VERSION}",
    launch=launch,
    own_tokens=8_000,
    summarises=("context summarization agent",),
)
