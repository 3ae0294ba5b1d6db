from __future__ import annotations

import resource
import sys
from pathlib import Path

from gyre.actors import Actor, Ask, Node, ProcessSpec, handles


class Say(Ask[int], frozen=True, kw_only=True):
    """Prints a text; with `full`, to a log that takes no more."""

    text: str
    full: bool


class Chatty(Actor):
    @handles(Say)
    async def say(self, message: Say) -> int:
        if message.full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        print(message.text)
        sys.stderr.write(message.text)
        sys.stderr.flush()
        return len(message.text)


async def test_a_log_that_takes_no_more_harms_no_child(tmp_path: Path) -> None:
    log = tmp_path / "chatty.log"
    async with Node(name="test") as node:
        spec = ProcessSpec(name="chatty", actor="tests.actors.test_child_log:Chatty", log_path=log)
        chatty = await node.spawn(spec)
        assert await chatty.ask(Say(text="ümläut\n", full=False)) == 7
        assert await chatty.ask(Say(text="lost\n" * 5000, full=True)) == 25000
        assert await chatty.ask(Say(text="lost", full=True)) == 4
    assert log.read_text(encoding="utf-8") == "ümläut\n\nümläut\n"
