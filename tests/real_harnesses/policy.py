"""What the policy reads and says: answers are functions of the prompt's text, as a model's are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gyre.cell.engine.base import GenerateRequest

END = "<|im_end|>"
# How each harness runs a command, by the name of its tool.
_SHELLS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "Bash": lambda command: {"command": command, "description": "runs it"},
    "exec_command": lambda command: {"cmd": command},
    "run_shell_command": lambda command: {"command": command, "is_background": False},
    "bash": lambda command: {"command": command, "description": "runs it"},
}
# mini-swe-agent ends with a command.
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass(frozen=True)
class Turn:
    role: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """A prompt as the policy reads it."""

    text: str

    @cached_property
    def turns(self) -> list[Turn]:
        found = (part.partition("\n") for part in self.text.split("<|im_start|>")[1:])
        return [Turn(role, text.removesuffix("\n").removesuffix(END)) for role, _, text in found][:-1]

    @cached_property
    def tools(self) -> dict[str, dict[str, Any]]:
        first = self.turns[0] if self.turns else Turn("", "")
        _, marked, listed = first.text.rpartition("# Tools\n")
        offered = [json.loads(line)["function"] for line in listed.splitlines() if marked and line]
        return {tool["name"]: tool for tool in offered}

    @property
    def results(self) -> list[str]:
        """Of tools, all so far."""
        return re.findall(r"<tool_response>(.*?)</tool_response>", self.text, re.DOTALL)

    def said(self, text: str) -> bool:
        """Whether an assistant's turn holds it."""
        return any(turn.role == "assistant" and text in turn.text for turn in self.turns)

    def runs(self, command: str) -> str:
        """A call of the shell that is offered."""
        name = next(name for name in _SHELLS if name in self.tools)
        return call(name, _SHELLS[name](command))

    def ends(self, text: str) -> str:
        """The last answer."""
        return self.runs(SUBMIT) if SUBMIT in self.text else text


Policy = Callable[[Prompt], str]


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """Written as a model might: not as `json.dumps` has it, nor as harnesses write it again."""
    return f'<tool_call>{{"arguments":  {json.dumps(arguments)}, "name": "{name}"}}</tool_call>'


class Speaker:
    """Turns a policy into answers in tokens: the same whenever a call is resumed."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.policy = policy
        self.end: int = self.tokenizer.token_to_id(END)
        self._answers: dict[str, list[int]] = {}

    def answer(self, request: GenerateRequest) -> list[int]:
        if request.call not in self._answers:
            prompt = list(request.prompt_ids[: request.prompt_tokens])
            text = self.policy(Prompt(self.tokenizer.decode(prompt, skip_special_tokens=False)))
            self._answers[request.call] = self._ids(text + END)
        return self._answers[request.call]

    def _ids(self, text: str) -> list[int]:
        """Not the ids that the text is encoded to: a model is free to sample others."""
        ids: list[int] = []
        for piece in re.split(r"(<[|/a-z_]+>)", text):
            special = self.tokenizer.token_to_id(piece)
            if special is not None:
                ids.append(special)
                continue
            for at in range(0, len(piece), 5):
                ids += self.tokenizer.encode(piece[at : at + 5], add_special_tokens=False).ids
        return ids
