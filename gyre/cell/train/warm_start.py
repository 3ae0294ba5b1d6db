"""A short supervised warm start on demonstrations, before step 0."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gyre.cell.config import WarmStartConfig
from gyre.cell.recipes import FAULTS, RecipeError, load_function

IGNORED = -100
DEMOS_FIX = 'it is called without arguments and yields conversations {"messages", "tools"} without end'


def warm_start(model: PreTrainedModel, folder: Path, config: WarmStartConfig) -> float:
    """Trains `model` in place to say what the assistant says in each demonstration `{"messages", "tools"}`.
    Returns the last loss. Raises RecipeError."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    demos = _endless(config.demos)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    loss = torch.zeros(())
    for step in range(config.steps):
        token_ids, labels = _batch(tokenizer, config.demos, islice(demos, config.batch), model.device)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (step + 1) / 20) * max(0.1, 1.0 - step / config.steps)
        loss = model(input_ids=token_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    return float(loss.detach())


def _endless(name: str) -> Iterator[dict[str, Any]]:
    count = 0
    try:
        for demo in load_function(name)():
            yield demo
            count += 1
    except FAULTS as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(name, f"raised {type(error).__name__}: {error}", DEMOS_FIX) from error
    raise RecipeError(name, f"ended after {count} conversations", DEMOS_FIX)


def _batch(
    tokenizer: PreTrainedTokenizerBase, name: str, demos: Iterator[dict[str, Any]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids int64[N, T], padded, and labels int64[N, T]: the ids where the assistant speaks."""
    rows = [_row(tokenizer, name, demo) for demo in demos]
    longest = max(len(ids) for ids, _ in rows)
    token_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (ids, spoken) in enumerate(rows):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.where(torch.tensor(spoken), torch.tensor(ids), IGNORED)
    return token_ids.to(device), labels.to(device)


def _row(tokenizer: PreTrainedTokenizerBase, name: str, demo: Any) -> tuple[list[int], list[bool]]:
    try:
        ids, spoken = _encode(tokenizer, demo["messages"], demo.get("tools"))
    except Exception as error:
        # A chat template may raise anything.
        problem = f"yielded what the chat template cannot show ({type(error).__name__}: {error})"
        raise RecipeError(name, problem, DEMOS_FIX) from error
    if not ids:
        raise RecipeError(name, "yielded a conversation in which no assistant speaks", DEMOS_FIX)
    return ids, spoken


def _encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None
) -> tuple[list[int], list[bool]]:
    """Piece by piece, as a conversation grows through the proxy: what is new to the model, its answer with
    the mark that ends it, and so on; so that both see the same tokens."""
    end = tokenizer.eos_token or ""
    ids: list[int] = []
    spoken: list[bool] = []
    shown = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:index], tools, generation=True)
        whole = _render(tokenizer, messages[: index + 1], tools, generation=False)
        whole = whole[: whole.rindex(end) + len(end)]
        for text, says in ((prompt[len(shown) :], False), (whole[len(prompt) :], True)):
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += piece
            spoken += [says] * len(piece)
        shown = whole
    return ids, spoken


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    *,
    generation: bool,
) -> str:
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=generation
    )
    assert isinstance(text, str)
    return text
