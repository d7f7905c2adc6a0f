"""Scripted agents: the one that makes no mistake, and some that lack one ability each.

They read what the tool says, as the model does, and the operations in the task's payload. Only the
oracle knows in which form numbers arrive. Demonstrations are runs of an agent with mistakes.
"""

import json
from collections.abc import Sequence
from typing import Any

from operations import BY_TEXT, FORMS, program, right_lines
from trials import PASSED

from agent_r1_proto.tasks import Task

DONE = "<answer>done</answer>"


def call_text(code: str) -> str:
    """One call in compact Hermes JSON; the tokenizer's markers hold its scaffolding."""
    call = {"name": "python_exec", "arguments": {"code": code}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


class Oracle:
    """Writes the right program at once."""

    def __init__(self, task: Task) -> None:
        payload: Any = task.payload
        self._operations = [BY_TEXT[text] for text in payload["operations"]]
        self._forms = {form.name: form for form in FORMS}
        self._form = self._forms[payload["form"]]

    def turn(self, observations: Sequence[str]) -> str:
        """Return the text of the next turn.

        Args:
            observations: what the tool answered; [] before the first program.
        """
        if observations:
            return DONE
        return call_text(program(right_lines(self._form, self._operations)))


class NeverRepairs(Oracle):
    """Makes no mistake where numbers arrive as they are, and leaves other programs as they fail."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._form = self._forms["plain"]


class OneRepair(NeverRepairs):
    """Takes every failure for that of one form, without reading what it says."""

    def turn(self, observations: Sequence[str]) -> str:
        """Repair blindly."""
        if observations and observations[0] != PASSED:
            self._form = self._forms["texts"]
            observations = ()
        return super().turn(observations)


class SameProgram(Oracle):
    """Writes one program for every task."""

    def turn(self, observations: Sequence[str]) -> str:
        """Sort."""
        return DONE if observations else call_text("def f(x):\n return sorted(x)")
