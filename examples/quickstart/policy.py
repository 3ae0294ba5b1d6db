"""The quickstart's policy: a small Llama with its own tokenizer, and demonstrations for its warm start.

The demonstrations show how the tools are spoken to, not where a file belongs: a folder is drawn from three
of the four, the two wrong ones more often than the right one. Which of the three is right the policy learns
by reward alone; it starts at about the reward of chance.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COMPACTED = 0.3  # share of calls of a demonstration that are followed by a compaction
SUMMARY = "some items are filed"
FINAL = "done"
BOX_PROMPT = "file the box"

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{
    arguments if arguments is string else arguments | tojson }}}</tool_call>
{%- endfor -%}
{%- if loop.first and tools -%}
{{ '\n' }}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor -%}
{%- endif -%}
<|im_end|>{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif -%}
""".strip()


def _sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"quickstart_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


harness = _sibling("harness")
tasks = _sibling("tasks")


def demos(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Endless conversations `{"messages", "tools"}`, every assistant message in them to be imitated."""
    rng = random.Random(seed)
    while True:
        conversations: dict[str, dict[str, Any]] = {}

        def ask(messages: list, tools: list | None, seen: dict = conversations) -> tuple[dict, int]:
            reply = _reply(messages, tools, rng)
            key = json.dumps([messages[:2], tools is None])
            seen[key] = {"messages": [*messages, reply], "tools": tools}
            compact = rng.random() < COMPACTED
            return reply, harness.COMPACT_TOKENS + 1 if compact else 0

        files, boxed = tasks.draw_names(rng)
        harness.Session(ask, lambda item, folder: None, tasks.PROMPT, files, boxed).run()
        yield from conversations.values()


def write_model(folder: Path) -> None:
    """Writes a Hugging Face model folder: untrained weights, tokenizer, chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of the words that the demonstrations use."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(400), trainer)
    # Not special: a tool call is part of the text that the model says.
    bpe.add_tokens(["<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}'])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def _texts(conversations: int) -> Iterator[str]:
    """What the demonstrations say, without the marks of the template."""
    for demo in itertools.islice(demos(), conversations):
        for message in demo["messages"]:
            yield message["role"]
            yield message["content"] or ""
            for call in message.get("tool_calls") or []:
                yield call["function"]["name"]
                yield from itertools.chain(*json.loads(call["function"]["arguments"]).items())


def _reply(messages: list, tools: list | None, rng: random.Random) -> dict[str, Any]:
    """What an agent that knows the tools but not the folders would answer."""
    if tools is None:
        return {"role": "assistant", "content": SUMMARY}
    position = messages[-1]["content"].rpartition("\n")[2]
    if position == BOX_PROMPT:
        position = messages[0]["content"].rpartition("\n")[2]
    if position == harness.next_text(harness.BOX):
        return _call("delegate", "prompt", BOX_PROMPT)
    if position.startswith(harness.next_text("")):
        item = position.removeprefix(harness.next_text(""))
        return _call("put", "entry", harness.entry(item, clumsy_folder(item, rng)))
    return {"role": "assistant", "content": FINAL}


def clumsy_folder(item: str, rng: random.Random) -> str:
    """The right folder with probability 2/7, one of two wrong ones with 5/14 each; the fourth never."""
    extension = item.rpartition(".")[2]
    right = harness.FOLDERS.index(tasks.FOLDER_OF[extension])
    ruled_out = (right + 1 + list(tasks.FOLDER_OF).index(extension) % 3) % len(harness.FOLDERS)
    shown = [index for index in range(len(harness.FOLDERS)) if index != ruled_out]
    weights = [4 if index == right else 5 for index in shown]
    return str(harness.FOLDERS[rng.choices(shown, weights)[0]])


def _call(name: str, parameter: str, value: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({parameter: value})}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
