from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre.proxy.template import ChatTemplate, TemplateRefused, TemplateUnusable, load_chat_template
from tests.proxy.tokenizer_folders import CHATML, PLAIN, SMOLLM2, write_tokenizer

TOOLS = [{"type": "function", "function": {"name": "put", "description": "Files <it>.", "parameters": {}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You tidy an inbox."},
    {"role": "user", "content": "next: k7.csv"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "put", "arguments": {"folder": "däta"}}}],
    },
    {"role": "tool", "content": "next: box"},
]


@pytest.mark.parametrize("source", [CHATML, SMOLLM2, PLAIN])
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_renders_as_transformers_does(source: str, generation_prompt: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"eos_token": "<|im_end|>"}
    tools = TOOLS if "tools" in source else None
    rendered, _ = utils.render_jinja_template(
        conversations=[MESSAGES],
        tools=tools,
        chat_template=source,
        add_generation_prompt=generation_prompt,
        **special,
    )
    ours = ChatTemplate(source, special).render(MESSAGES, tools or (), generation_prompt=generation_prompt)
    assert ours == rendered[0]


def test_tells_whether_a_template_shows_tools() -> None:
    assert ChatTemplate(CHATML, {}).supports_tools
    assert not ChatTemplate(SMOLLM2, {}).supports_tools


def test_strftime_now_and_loop_controls_work() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ strftime_now('%Y') }}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render(MESSAGES, (), generation_prompt=False).isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + None }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_fails_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateRefused, match="chat template refused"):
        ChatTemplate(source, {}).render(MESSAGES, (), generation_prompt=True)


def test_reads_the_template_from_tokenizer_config(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, chat_template=[{"name": "default", "template": "{{ eos_token }}"}])
    (folder / "chat_template.jinja").unlink()
    assert load_chat_template(folder).render(MESSAGES, (), generation_prompt=True) == "<|im_end|>"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "tokenizer_config.json is not JSON"),
        ("[]", "tokenizer_config.json is not an object"),
        ("{}", "no chat template: add chat_template.jinja"),
        (json.dumps({"chat_template": "{% if %}"}), "does not compile"),
    ],
)
def test_an_unusable_folder_is_named_with_the_reason(tmp_path: Path, config: str, reason: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TemplateUnusable, match=reason) as caught:
        load_chat_template(tmp_path)
    assert caught.value.folder == tmp_path
