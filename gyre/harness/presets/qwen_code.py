"""qwen-code, headless, over OpenAI Chat Completions."""

from __future__ import annotations

from gyre.harness.presets.preset import Launch, Preset, Terms, reads_prompt

VERSION = "0.15.10"
RETRIES = 10


def launch(program: str, terms: Terms) -> Launch:
    flags = ("--approval-mode", "yolo", "--auth-type", "openai", "--output-format", "json")
    # It compacts at a fraction of its window.
    window = 2 * terms.compact_tokens
    generation = {"timeout": terms.timeout_ms, "maxRetries": RETRIES, "contextWindowSize": window}
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "openai"}, "folderTrust": {"enabled": False}},
        "model": {
            "name": "{model}",
            "generationConfig": generation,
            "chatCompression": {"contextPercentageThreshold": 0.5},
        },
    }
    return Launch(
        command=reads_prompt(program, *flags, *terms.arguments),
        environment={
            "OPENAI_MODEL": "{model}",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(terms.max_new_tokens),
            "QWEN_CODE_NO_RELAUNCH": "1",
        },
        files={".qwen/settings.json": settings},
    )


PRESET = Preset(
    name="qwen-code",
    program="qwen",
    version=VERSION,
    install=f"npm install -g @qwen-code/qwen-code@{VERSION}",
    launch=launch,
    own_tokens=19_000,
    summarises=("component that summarizes",),
)
