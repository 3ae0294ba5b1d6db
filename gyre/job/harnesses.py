"""What a job's harness must satisfy: a command, a preset or an actor, and nothing that is for another."""

from __future__ import annotations

from collections.abc import Iterator

from gyre.harness.config import HarnessConfig
from gyre.harness.presets import PRESETS, Preset, compact_tokens
from gyre.job.broken import Broken, broken
from gyre.job.decode import shown
from gyre.job.evaluation import command_faults
from gyre.job.named import named_faults
from gyre.job.tables import Job

OF_PRESETS = ("program", "version", "arguments", "compact_tokens", "max_compactions")
DEFAULTS = HarnessConfig()


def harness_faults(job: Job) -> Iterator[Broken]:
    harness = job.harness
    preset = PRESETS.get(harness.preset)
    if preset is not None:
        yield from _preset(job, preset)
    elif harness.actor is None:
        yield from command_faults("harness.command", harness.command, "; or harness.preset or harness.actor")
    if preset is None:
        yield from _only_with(job, OF_PRESETS, "preset", "with one of " + ", ".join(PRESETS))
    if harness.actor is None:
        yield from _only_with(job, ("options", "own_process"), "actor", "with harness.actor")
    else:
        for fault in named_faults("harness.actor", harness.actor, "class"):
            yield frozenset(["harness.actor"]), fault
        yield from _beside_actor(job)
    if not harness.here and job.cluster.listen is None:
        found, legal = "here = false", "with cluster.listen, where machines join that play executions"
        yield broken(found, legal, "harness.here", "cluster.listen")
    for name, value in harness.environment.items():
        if not name or "=" in name or "\0" in name + value:
            found, legal = shown(f"{name}={value}"), "names without '=', nothing with NUL characters"
            yield broken(found, legal, "harness.environment")
    if harness.overall_timeout_s < harness.timeout_s:
        yield broken(
            shown(harness.overall_timeout_s),
            f"at least harness.timeout_s = {harness.timeout_s}, after which what is left is scored",
            "harness.overall_timeout_s",
            "harness.timeout_s",
        )


def _preset(job: Job, preset: Preset) -> Iterator[Broken]:
    harness, room = job.harness, job.model.context_tokens - job.rollout.max_new_tokens
    if harness.command:
        found = shown(list(harness.command))
        legal = f"nothing beside the preset {preset.name}, whose further arguments are harness.arguments"
        yield broken(found, legal, "harness.command", "harness.preset")
    if any("\0" in word for word in harness.arguments):
        legal = "words without NUL characters"
        yield broken(shown(list(harness.arguments)), legal, "harness.arguments")
    if harness.proxy.tool_format == "plain":
        legal = f"the format of the policy's tool calls: {preset.name} works with tools"
        yield broken(shown("plain"), legal, "harness.proxy.tool_format", "harness.preset")
    if not preset.summarises:
        for key in ("compact_tokens", "max_compactions"):
            if getattr(harness, key) != getattr(DEFAULTS, key):
                found, legal = f"{key} of {preset.name}", "nothing: it does not compact its context"
                yield broken(found, legal, f"harness.{key}", "harness.preset")
    if harness.compact_tokens > room:
        yield broken(
            shown(harness.compact_tokens),
            f"at most {room}, the room for prompts: model.context_tokens - rollout.max_new_tokens",
            "harness.compact_tokens",
            "model.context_tokens",
            "rollout.max_new_tokens",
        )
    elif compact_tokens(harness, job.model.context_tokens, job.rollout.max_new_tokens) <= preset.own_tokens:
        key = "harness.compact_tokens" if harness.compact_tokens else "model.context_tokens"
        yield broken(
            shown(harness.compact_tokens or job.model.context_tokens),
            f"more: what {preset.name} says before the task begins is about {preset.own_tokens} tokens long, "
            "and it would compact its context for ever",
            key,
            "harness.preset",
            "rollout.max_new_tokens",
        )


def _only_with(job: Job, keys: tuple[str, ...], other: str, allowed: str) -> Iterator[Broken]:
    for key in keys:
        if getattr(job.harness, key) != getattr(DEFAULTS, key):
            found = f"{key} without {'an actor' if other == 'actor' else 'a preset'}"
            yield broken(found, f"only {allowed}", f"harness.{key}", f"harness.{other}")


def _beside_actor(job: Job) -> Iterator[Broken]:
    """An actor is no command, and what is for commands would not be heeded."""
    if job.harness.preset != "custom":
        found = shown(job.harness.preset)
        allowed = "nothing beside harness.actor"
        yield broken(found, allowed, "harness.preset", "harness.actor")
    if not job.harness.here:
        found, allowed = "here = false", "true with harness.actor, which lives on the job's machine"
        yield broken(found, allowed, "harness.here", "harness.actor")
    for key in ("command", "read_only"):
        if value := getattr(job.harness, key):
            found = shown([str(word) for word in value])
            allowed = "nothing beside harness.actor, which is no command"
            yield broken(found, allowed, f"harness.{key}", "harness.actor")
    if job.harness.environment and not job.harness.own_process:
        found = shown(job.harness.environment)
        allowed = "with harness.actor only where harness.own_process = true"
        yield broken(found, allowed, "harness.environment", "harness.actor", "harness.own_process")
