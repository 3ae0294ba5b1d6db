"""Chat templates as `transformers` renders them, without importing it, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.ext import Extension

# What a template may run into with messages it was not written for.
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)

_LATER_SYSTEM = "a later system message"


class TemplateUnusable(ValueError):
    """The tokenizer's folder has no chat template that can be used."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"{folder}: {reason}")
        self.folder = folder
        self.reason = reason


class TemplateRefused(ValueError):
    """The template cannot show these messages (it raised, or its sandbox did)."""


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training masks; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template. `supports_tools`: it shows the tools it is given; `shows_later_systems`:
    system messages that are not the first too."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.supports_tools = "tools" in names
        self.shows_later_systems = self._shows_later_systems()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool,
    ) -> str:
        """The conversation as text. Raises TemplateRefused."""
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._special_tokens,
            )
        except _REFUSALS as error:
            raise TemplateRefused(f"the chat template refused these messages: {error}") from error

    def _shows_later_systems(self) -> bool:
        turns = (("system", "a"), ("system", _LATER_SYSTEM), ("user", "b"), ("system", _LATER_SYSTEM))
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self.render(messages, (), generation_prompt=True)
        except TemplateRefused:
            return False
        return text.count(_LATER_SYSTEM) == 2


def load_chat_template(folder: Path) -> ChatTemplate:
    """From `chat_template.jinja` or `tokenizer_config.json`. Raises TemplateUnusable."""
    config = read_tokenizer_config(folder)
    source = _template_source(folder, config)
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := token_text(config.get(name))) is not None
    }
    try:
        return ChatTemplate(source, special)
    except jinja2.TemplateError as error:
        raise TemplateUnusable(folder, f"its chat template does not compile: {error}") from error


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, empty where there is none. Raises TemplateUnusable."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TemplateUnusable(folder, f"tokenizer_config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise TemplateUnusable(folder, "tokenizer_config.json is not an object")
    return config


def token_text(entry: Any) -> str | None:
    """A special token's text: tokenizer_config.json has it bare or as an added token's object."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise TemplateUnusable(
            folder, "no chat template: add chat_template.jinja, or chat_template to tokenizer_config.json"
        )
    return source


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
