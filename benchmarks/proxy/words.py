"""A tokenizer of a made-up language, and texts in it whose length in tokens is known."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}\
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
WORDS = 3000


def words() -> list[str]:
    """Of 2 to 5 letters: with the space before it each is a token, of as many bytes as those of English."""
    rng = random.Random(7)
    found: dict[str, None] = {}
    while len(found) < WORDS:
        found["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 5)))] = None
    return [*found]


def text(tokens: int, seed: int) -> str:
    return "".join(f" {word}" for word in random.Random(seed).choices(words(), k=tokens))


def tool(number: int) -> dict[str, Any]:
    """As long as those of harnesses are."""
    properties = {f"field{at}": {"type": "string", "description": text(40, at)} for at in range(4)}
    parameters = {"type": "object", "properties": properties, "required": ["field0"]}
    function = {"name": f"tool{number}", "description": text(200, number), "parameters": parameters}
    return {"type": "function", "function": function}


def write_tokenizer(folder: Path) -> tuple[int, ...]:
    """Returns ids of plain words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=40_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([f" {word}" for word in words() for _ in range(2)], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ids = (tokenizer.token_to_id(f"Ġ{word}") for word in words()[:500])
    return tuple(token for token in ids if token is not None)
