from __future__ import annotations

import pytest

from gyre.actors import Actor, ChildSpec, ExitReason, Node, NodeFailed, ProcessSpec
from tests.actors.zoo import CounterConfig, Fail


class Parent(Actor):
    """Asks its child for what it cannot do."""

    async def started(self) -> None:
        spec = ProcessSpec(name="child", actor="tests.actors.zoo:Counter", config=CounterConfig())
        self.child = await self.context.spawn(spec)
        self.context.run(self._ask(), name="ask")

    async def _ask(self) -> None:
        await self.child.ask(Fail(text="no such file\n  or folder"))


async def test_the_first_cause_of_a_failure_is_known_through_all_layers() -> None:
    with pytest.raises(NodeFailed) as caught:
        async with Node(name="test") as node:
            await node.spawn(ChildSpec(name="parent", start=Parent))
            await node.failed()
    reason = ExitReason.of(caught.value)
    assert reason.brief == "ValueError: no such file or folder"
    assert "in fail" in reason.first.traceback


def test_the_first_of_a_group_of_errors_stands_for_all() -> None:
    group = BaseExceptionGroup("", [ExceptionGroup("", [KeyError("a")]), ValueError("b")])
    assert ExitReason.of(group).brief == "KeyError: 'a'"


def test_what_was_killed_says_so_without_its_last_output() -> None:
    reason = ExitReason(kind="exit", signal="SIGKILL", stderr_tail=("a", "b"))
    assert reason.brief == "exit (killed by SIGKILL)"
    assert str(reason).endswith("its last output:\n  a\n  b")
