"""mini-swe-agent, headless, over OpenAI Chat Completions."""

from __future__ import annotations

from gyre.harness.presets.preset import Launch, Preset, Terms

VERSION = "2.4.6"
RETRIES = 10


def launch(program: str, terms: Terms) -> Launch:
    """It has no compaction: it ends where its context does."""
    options = {"drop_params": True, "max_tokens": terms.max_new_tokens, "timeout": terms.timeout_s}
    config = {
        "run": {"task": "{prompt}"},
        # Not the interactive one, which asks a person when it is done.
        "agent": {"agent_class": "default", "cost_limit": 0},
        "environment": {"environment_class": "local"},
        "model": {
            "model_name": "openai/{model}",
            "cost_tracking": "ignore_errors",
            "model_kwargs": options,
        },
    }
    return Launch(
        command=(program, "-c", "mini.yaml", "-c", "{home}/gyre.yaml", *terms.arguments),
        environment={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(RETRIES),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={"gyre.yaml": config},
    )


PRESET = Preset(
    name="mini-swe-agent",
    program="mini",
    version=VERSION,
    install=f"pip install mini-swe-agent=={VERSION}",
    launch=launch,
    own_tokens=1_000,
    distribution="mini-swe-agent",
)
