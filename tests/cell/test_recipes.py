"""Functions that a job file names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.cell.recipes import RecipeError, load_function, model_folder


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no.such.module:write", "cannot be imported"),
        ("/no/such/file.py:write", "cannot be imported"),
        ("json:no_such_function", "has no function"),
        ("write", "cannot be imported"),
    ],
)
def test_a_recipe_that_is_not_there_is_named(name: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        load_function(name)


def test_a_recipe_may_be_named_in_a_module() -> None:
    assert load_function("json:dumps")([1]) == "[1]"


def test_a_model_is_written_once_and_then_taken_from_the_cache(tmp_path: Path) -> None:
    recipe = tmp_path / "model.py"
    recipe.write_text("def write(folder):\n    (folder / 'config.json').write_text('{}')\n")
    first = model_folder(f"{recipe}:write", tmp_path / "cache")
    (first / "mark").touch()
    assert (model_folder(f"{recipe}:write", tmp_path / "cache") / "mark").exists()


def test_a_changed_recipe_writes_anew(tmp_path: Path) -> None:
    recipe = tmp_path / "model.py"
    recipe.write_text("def write(folder):\n    (folder / 'a').touch()\n")
    first = model_folder(f"{recipe}:write", tmp_path / "cache")
    recipe.write_text("def write(folder):\n    (folder / 'bb').touch()\n")
    second = model_folder(f"{recipe}:write", tmp_path / "cache")
    assert second != first
    assert (second / "bb").exists()


def test_a_recipe_that_fails_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    recipe = tmp_path / "model.py"
    recipe.write_text("def write(folder):\n    raise OSError('no room')\n")
    with pytest.raises(RecipeError, match="no room"):
        model_folder(f"{recipe}:write", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".draft")]
