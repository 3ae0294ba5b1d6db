"""Claude Code, headless, over Anthropic Messages."""

from __future__ import annotations

from gyre.harness.presets.preset import Launch, Preset, Terms, reads_prompt

VERSION = "2.1.220"
# What it keeps free of its window: for an answer, at most so much, and before it compacts.
ANSWER_TOKENS = 20_000
SPARE_TOKENS = 13_000


def launch(program: str, terms: Terms) -> Launch:
    flags = ("-p", "--dangerously-skip-permissions", "--output-format", "json")
    # The window it believes in, said twice: AUTO_COMPACT_WINDOW alone is not heeded below 100,000, and with
    # MAX_CONTEXT_TOKENS alone it compacts only when a prompt was refused. The proxy tells the real one.
    window = terms.compact_tokens + min(terms.max_new_tokens, ANSWER_TOKENS) + SPARE_TOKENS
    return Launch(
        command=reads_prompt(program, *flags, *terms.arguments),
        environment={
            "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
            # Root may skip permissions in a sandbox only.
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_FEEDBACK_COMMAND": "1",
            "DISABLE_INSTALLATION_CHECKS": "1",
            "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_DISABLE_1M_CONTEXT": "1",
            # It would ask a second time, without a stream, what is still being answered.
            "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(terms.max_new_tokens),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(window),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window),
            "CLAUDE_CODE_BLOCKING_LIMIT_OVERRIDE": str(100 * window),
            "API_TIMEOUT_MS": str(terms.timeout_ms),
        },
    )


PRESET = Preset(
    name="claude-code",
    program="claude",
    version=VERSION,
    install=f"npm install -g @anthropic-ai/claude-code@{VERSION}",
    launch=launch,
    own_tokens=22_000,
    summarises=("CRITICAL: Respond with TEXT ONLY",),
)
