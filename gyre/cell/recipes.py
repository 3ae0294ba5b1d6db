"""Functions that a job file names: `file.py:function` or `package.module:function`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE = Path.home() / ".cache" / "gyre" / "models"
# What a recipe may raise: one that calls sys.exit must not end the job without a word.
FAULTS = (Exception, SystemExit)


class RecipeError(Exception):
    """A recipe cannot be had or failed: `name` says which, `fix` what to do."""

    def __init__(self, name: str, problem: str, fix: str) -> None:
        super().__init__(f"{name}: {problem}; {fix}")
        self.name = name
        self.problem = problem
        self.fix = fix


def load_function(name: str) -> Callable[..., Any]:
    """The function that a job file names. Raises RecipeError."""
    place, _, function = name.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except FAULTS as error:
        fix = "name it as file.py:function or package.module:function"
        raise RecipeError(name, f"cannot be imported ({type(error).__name__}: {error})", fix) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise RecipeError(name, f"{place} has no function {function!r}", "define it there")
    return found  # type: ignore[no-any-return]


def model_folder(recipe: str, cache: Path = CACHE) -> Path:
    """The Hugging Face folder that a recipe, a function `(folder)`, writes: once, then from the cache, whose
    key is the recipe's name and the text of its file. Raises RecipeError."""
    folder = cached_folder(recipe, cache)
    if folder.is_dir():
        return folder
    write = load_function(recipe)
    draft = cache / f"{folder.name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        write(draft)
    except FAULTS as error:
        problem = f"raised {type(error).__name__}: {error}"
        raise RecipeError(recipe, problem, "it is called with (folder) and writes a model there") from error
    draft.rename(folder)
    return folder


def cached_folder(recipe: str, cache: Path = CACHE) -> Path:
    """Where `model_folder` has that folder, or would write it."""
    source = Path(recipe.rpartition(":")[0])
    text = source.read_bytes() if source.is_file() else b""
    return cache / hashlib.sha256(recipe.encode() + b"\0" + text).hexdigest()[:16]


def _load_file(path: Path) -> Any:
    name = f"_recipe_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Classes look there for what their annotations name.
    sys.modules[name] = module
    # A recipe may import what lies beside it.
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(path.parent))
    return module
