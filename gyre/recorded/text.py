"""The text of tokens, where the tokenizer of a run is still to be found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from gyre.cell.checkpoints import CheckpointFolder
from gyre.cell.recipes import cached_folder
from gyre.job import Job


class TokenText:
    """What tokens say, each by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """A token that is a part of a character is given as the tokenizer writes it."""
        if token not in self._known:
            self._known[token] = self._decode(token)
        return self._known[token]

    def joined(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _decode(self, token: int) -> str:
        raw = self._tokenizer.id_to_token(token)
        if raw is None:
            return "?"
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return str(raw) if "\ufffd" in text else text


def token_text(folder: Path, job: Job | None) -> TokenText | None:
    """By the newest checkpoint in the run folder, else by the model that the job names. None where no
    tokenizer is left, or none that can be read."""
    for place in _places(folder, job):
        path = place / "tokenizer.json"
        try:
            if path.is_file():
                return TokenText(Tokenizer.from_file(str(path)))
        except Exception:  # tokenizers raises bare Exception
            continue
    return None


def _places(folder: Path, job: Job | None) -> list[Path]:
    checkpoints = CheckpointFolder(folder / "checkpoints", keep=0)
    found = [checkpoints.path(step) for step in reversed(checkpoints.steps())]
    if job is not None and job.model.path is not None:
        found.append(job.model.path)
    if job is not None and job.model.recipe is not None:
        found.append(cached_folder(job.model.recipe))
    return found
