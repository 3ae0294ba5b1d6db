"""A node in a notebook: cells with top-level await, each a task of its own, on a loop that is not ours."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import signal
import sys
import textwrap
import types
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gyre.actors import ChildSpec, Node, NodeFailed, ProcessSpec
from tests.actors.zoo import Counter, CounterConfig, Crash

Run = Callable[[str], Awaitable[Any]]


def console(monkeypatch: pytest.MonkeyPatch) -> Run:
    """As `python -m asyncio` runs what is typed: the value is that of the last expression."""
    module = types.ModuleType("cells")
    monkeypatch.setitem(sys.modules, "cells", module)

    async def run(cell: str) -> Any:
        tree = ast.parse(textwrap.dedent(cell))
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            tree.body[-1] = ast.Assign([ast.Name("_", ast.Store())], last.value)
            ast.fix_missing_locations(tree)
        code = compile(tree, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        function = types.FunctionType(code, vars(module))
        result = function()
        if inspect.iscoroutine(result):
            await asyncio.create_task(result)
        return vars(module).get("_")

    return run


def ipython(monkeypatch: pytest.MonkeyPatch) -> Run:
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    shell = InteractiveShell()

    async def run(cell: str) -> Any:
        cell = textwrap.dedent(cell)
        running = shell.run_cell_async(cell, transformed_cell=shell.transform_cell(cell))
        ran = await asyncio.create_task(running)
        ran.raise_error()
        return ran.result

    return run


RUNNERS = [console, *([ipython] if importlib.util.find_spec("IPython") is not None else [])]

CELLS = (
    """
    from gyre.actors import Actor, Ask, ChildSpec, Node, ProcessSpec, handles
    from tests.actors.zoo import Add as Plus, Counter as Far, CounterConfig

    class Add(Ask[int], frozen=True, kw_only=True):
        amount: int

    class Counter(Actor):
        def __init__(self):
            self.total = 0

        @handles(Add)
        async def add(self, message: Add) -> int:
            self.total += message.amount
            return self.total
    """,
    """
    node = await Node("notebook").start()
    counter = await node.spawn(ChildSpec(name="counter", start=Counter))
    """,
    "await counter.ask(Add(amount=2))",
    "await counter.ask(Add(amount=3))",
    """
    far = ProcessSpec(name="far", actor="tests.actors.zoo:Counter", config=CounterConfig(start=7))
    far = await node.spawn(far)
    await far.ask(Plus(amount=1))
    """,
    "await node.stop()",
)


@pytest.mark.parametrize("runner", RUNNERS)
async def test_cells_of_a_notebook_share_a_node(
    runner: Callable[[pytest.MonkeyPatch], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    tasks, kind = asyncio.all_tasks(), type(asyncio.get_running_loop())
    run = runner(monkeypatch)
    results = [await run(cell) for cell in CELLS]
    assert results[2:5] == [2, 5, 8]
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
    assert type(asyncio.get_running_loop()) is kind
    assert asyncio.all_tasks() == tasks


async def test_without_a_block_stop_raises_the_failure() -> None:
    node = await Node(name="open").start()
    ref = await node.spawn(
        ChildSpec(name="c", start=lambda: Counter(CounterConfig(start=0)), restart="temporary")
    )
    await ref.tell(Crash(text="it broke"))
    with pytest.raises(NodeFailed, match="it broke"):
        await node.failed()
    assert (current := asyncio.current_task()) is not None and current.cancelling() == 0
    with pytest.raises(NodeFailed, match="it broke"):
        await node.stop()


async def test_a_node_is_started_once() -> None:
    node = await Node(name="open").start()
    with pytest.raises(RuntimeError, match="make a new one"):
        await node.start()
    await node.stop()
    await node.stop()


def test_an_actor_of_a_notebook_is_in_no_module_that_another_process_could_import() -> None:
    with pytest.raises(ValueError, match="write it into a module"):
        ProcessSpec(name="far", actor="__main__:Counter")
