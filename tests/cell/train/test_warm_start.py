"""Demonstrations come from a function that the job names: what it does wrong is said by that name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gyre.cell.config import WarmStartConfig
from gyre.cell.model import load_model
from gyre.cell.recipes import RecipeError, model_folder
from gyre.cell.train.warm_start import warm_start

POLICY = Path(__file__).parents[3] / "examples" / "quickstart" / "policy.py"
TALK = "{'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'done'}]}"


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder(f"{POLICY}:write_model")


def run(folder: Path, tmp_path: Path, body: str) -> float:
    recipe = tmp_path / "demos.py"
    recipe.write_text(f"def demos():\n    {body}\n")
    config = WarmStartConfig(demos=f"{recipe}:demos", steps=3, batch=2)
    return warm_start(load_model(folder, "float32", torch.device("cpu")), folder, config)


def test_it_trains_on_what_is_demonstrated(folder: Path, tmp_path: Path) -> None:
    assert 0.0 < run(folder, tmp_path, f"while True: yield {TALK}") < 20.0


SILENT = "while True: yield {'messages': [{'role': 'user', 'content': 'a'}]}"
FAULTS = {
    "raise OSError('no demos')": r"raised OSError: no demos; it is called without arguments",
    f"yield {TALK}; import sys; sys.exit('enough')": r"raised SystemExit: enough",
    f"yield from [{TALK}] * 5": r"ended after 5 conversations",
    "return 7": r"raised TypeError: 'int' object is not iterable",
    "while True: yield ['hello']": r"yielded what the chat template cannot show \(TypeError",
    SILENT: r"yielded a conversation in which no assistant speaks",
}


@pytest.mark.parametrize("body", FAULTS)
def test_a_fault_of_the_demonstrations_is_named(folder: Path, tmp_path: Path, body: str) -> None:
    with pytest.raises(RecipeError, match=rf"demos\.py:demos: {FAULTS[body]}"):
        run(folder, tmp_path, body)
