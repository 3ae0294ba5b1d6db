"""What `/v1/models` says, which OpenAI's and Anthropic's clients both ask, each in its own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def speaks_anthropic(headers: Mapping[str, str]) -> bool:
    """All clients of Anthropic's API send its version."""
    return "anthropic-version" in headers


def listed_model(headers: Mapping[str, str], name: str) -> dict[str, Any]:
    """One model, in the form that the client expects."""
    if not speaks_anthropic(headers):
        return {"id": name, "object": "model", "created": 0, "owned_by": "gyre"}
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def listed_models(headers: Mapping[str, str], names: Sequence[str]) -> dict[str, Any]:
    """All of them; `names` has at least one."""
    models = [listed_model(headers, name) for name in names]
    if not speaks_anthropic(headers):
        return {"object": "list", "data": models}
    return {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
