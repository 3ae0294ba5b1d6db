"""A tokenizer of the size that real prompts want: trained on this project's own pages, in ChatML."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.proxy.tokenizer_folders import write_tokenizer

ROOT = Path(__file__).parents[2]


def write_large_tokenizer(folder: Path) -> Path:
    write_tokenizer(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("gyre/proxy/*.py"), *ROOT.glob("gyre/harness/*.py")]
    tokenizer.train_from_iterator((page.read_text() for page in sorted(pages)), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
