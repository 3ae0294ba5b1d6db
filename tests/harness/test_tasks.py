from collections import Counter
from pathlib import Path

import pytest

from gyre.harness.task import Part
from gyre.harness.tasks import Task, TaskOrder, TasksError, load_tasks, write_recipe

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "tasks.py"


def make_task(folder: Path, name: str, prompt: str = "do it") -> Path:
    task = folder / name
    task.mkdir(parents=True)
    (task / "prompt.md").write_text(prompt)
    return task


def named(count: int) -> list[Task]:
    return [Task(name=f"t{i}", folder=Path("/x"), prompt="p") for i in range(count)]


def test_tasks_are_loaded_by_name(tmp_path: Path) -> None:
    make_task(tmp_path, "b", "second")
    (make_task(tmp_path, "a") / "workspace").mkdir()
    make_task(tmp_path, ".hidden")
    (tmp_path / "README").write_text("no task")
    a, b = load_tasks(tmp_path)
    assert (a.name, b.name, b.prompt) == ("a", "b", "second")
    assert a.parts == (Part(tmp_path / "a" / "workspace", ""),)
    assert b.parts == ()


def test_a_task_without_a_prompt_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    with pytest.raises(TasksError, match=r"broken: has no prompt\.md; write"):
        load_tasks(tmp_path)


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe\xff"])
def test_a_prompt_that_is_no_text_is_named(tmp_path: Path, content: bytes) -> None:
    (make_task(tmp_path, "broken") / "prompt.md").write_bytes(content)
    with pytest.raises(TasksError, match=r"broken/prompt\.md"):
        load_tasks(tmp_path)


def test_an_empty_folder_of_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(TasksError, match=f"{tmp_path}: has no task"):
        load_tasks(tmp_path)


def test_a_missing_folder_of_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(TasksError, match="nowhere: cannot be read"):
        load_tasks(tmp_path / "nowhere")


def test_a_recipe_writes_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "def write(folder, count, seed):\n"
        "    for i in range(count):\n"
        "        (folder / f't{i}').mkdir()\n"
        "        (folder / f't{i}' / 'prompt.md').write_text(str(seed))\n"
    )
    write_recipe(f"{recipe}:write", tmp_path / "tasks", 2, 7)
    write_recipe(f"{recipe}:write", tmp_path / "tasks", 3, 8)
    assert [task.prompt for task in load_tasks(tmp_path / "tasks")] == ["7", "7"]


def test_a_recipe_that_fails_leaves_nothing_that_looks_written(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "def write(folder, count, seed):\n    (folder / 't').mkdir()\n    raise OSError('full')\n"
    )
    with pytest.raises(TasksError, match=r"recipe\.py:write: raised OSError: full"):
        write_recipe(f"{recipe}:write", tmp_path / "tasks", 2, 7)
    assert not (tmp_path / "tasks").exists()


def test_each_pass_draws_every_task_once_in_another_order() -> None:
    order = TaskOrder(named(20), seed=3)
    passes = [[order.task(20 * p + i).name for i in range(20)] for p in range(3)]
    assert all(set(Counter(names).values()) == {1} for names in passes)
    assert passes[0] != passes[1] != passes[2]


def test_the_order_is_a_function_of_seed_and_number() -> None:
    names = [TaskOrder(named(9), seed=1).task(number).name for number in range(40)]
    again = TaskOrder(named(9), seed=1)
    assert [again.task(number).name for number in reversed(range(40))] == names[::-1]
    assert [TaskOrder(named(9), seed=2).task(number).name for number in range(40)] != names


def test_the_quickstart_writes_tasks_that_load(tmp_path: Path) -> None:
    write_recipe(f"{QUICKSTART}:write_tasks", tmp_path / "a", 12, 0)
    write_recipe(f"{QUICKSTART}:write_tasks", tmp_path / "b", 12, 0)
    write_recipe(f"{QUICKSTART}:write_tasks", tmp_path / "c", 12, 1)

    def files(folder: str) -> list[str]:
        return sorted(str(p.relative_to(tmp_path / folder)) for p in (tmp_path / folder).rglob("*"))

    assert len(load_tasks(tmp_path / "a")) == 12
    assert files("a") == files("b") != files("c")
