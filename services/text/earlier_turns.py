"""Whether a chat template renders earlier turns as they were written, once there are later ones.

chat_format.py asks at the start. Many templates do not: they remove the thinking of earlier turns,
some at every reply, some only at a message of the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from agent_r1.text.chat_template import ChatTemplateError
from agent_r1_proto.tasks import Role
from agent_r1_proto.tools import ToolSpec

# Words that no template writes by itself, without whitespace at their ends (templates may strip).
QUESTION, THOUGHT, SAID = "Question-7f3a", "Thought-7f3a", "Said-7f3a"
REPLY = "Reply-7f3a"
_SPOKEN = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
_CALL_ID = "call7f3a{}"  # nine letters and digits: some templates accept no other length
ANY_TOOL = ToolSpec(
    name="tool7f3a",
    version="1",
    description="Any tool.",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}},
)
ANY_FUNCTION = ANY_TOOL.as_function()

Dialogue = list[dict[str, Any]]
Render = Callable[[Dialogue, Mapping[str, Any]], str]
"""Renders a dialogue up to the next turn of the model, with more variables of the template, and
without the thought that it may begin for the model."""


def dummy_id(index: int) -> str:
    """Return what a dialogue calls the call that a result answers, for the first ten results."""
    return _CALL_ID.format(index % 10)


def outside_message(index: int, role: Role, text: str) -> dict[str, str]:
    """Return a message as templates take it; a result says which call it answers."""
    call = {"tool_call_id": dummy_id(index), "name": ANY_FUNCTION["function"]["name"]}
    return {"role": role, "content": text, **(call if role == "tool" else {})}


def short_dialogue(roles: Sequence[Role], replies: Sequence[str]) -> Dialogue:
    """Return a question, a turn with a thought, and what follows it."""
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": _SPOKEN},
        *map(outside_message, range(len(roles)), roles, replies),
    ]


def count_alike(one: str, other: str) -> int:
    """Return how many characters two texts have alike, from the beginning."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in alike)


def keeps_turns(render: Render, role: Role, extra: Mapping[str, Any]) -> bool:
    """Say whether earlier turns stay as they were where messages of a role follow them.

    Compared are prompts, since the model samples after nothing else: what a template writes only at
    the end of a dialogue, where it asks for no turn, is in none of them. Nor is a thought that it
    begins for the model, which it may do after some messages only: the turn has it, if it goes on.
    """
    one = short_dialogue((role,), [REPLY])
    dialogues = [{"role": "user", "content": QUESTION}], one, [*one, *one[1:]]
    asked, first, second = (render(dialogue, extra) for dialogue in dialogues)
    start = count_alike(asked, first)
    end = asked[start:]  # "" where each turn is written as the generation prompt begins it
    turn = first[start : len(first) - len(end)]
    return (
        first.endswith(end)
        and second == first[:start] + turn + turn + end
        and turn.count(THOUGHT) == 1
    )


def keeping_key(render: Render, role: Role, template: str) -> str:
    """Name the setting under which a template keeps earlier turns, by trying them."""
    from jinja2 import Environment, TemplateError, meta

    names: set[str] = set()
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(
            template
        )
        names = meta.find_undeclared_variables(parsed)
    except TemplateError:
        pass
    for name in sorted(n for n in names if re.search("think|reason|keep|preserve|clear", n)):
        for value in (True, False):
            try:
                keeps = keeps_turns(render, role, {name: value})
            except ChatTemplateError:
                continue
            if keeps:
                return f"set env.chat_template_kwargs = {{{name} = {json.dumps(value)}}}"
    return (
        "env.chat_template_kwargs has no variable of this template that keeps them; put a "
        "chat_template.jinja that renders every turn as it was written beside the model"
    )
