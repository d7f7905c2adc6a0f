"""Messages of a dialogue as chat templates take them, with their tool calls.

Rollout renders prompts with it, the learner demonstrations, and the measuring of prompts both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1.text.control_tokens import map_texts
from agent_r1_proto.tasks import ChatMessage

Shown = dict[str, Any]
"""A message as a template takes it."""
WriteCalls = Callable[[Sequence[tuple[str, str]]], str]
"""Writes calls (name, and arguments as JSON) as a model does."""


class HiddenCallError(ValueError):
    """Neither the chat template nor the format of calls shows the calls of a message."""


def template_message(message: ChatMessage, change: Callable[[str], str]) -> Shown:
    """Return a message as templates take it.

    Args:
        message: of a task or a demonstration.
        change: is done to each of its texts.
    """
    shown: Shown = {"role": message.role, "content": change(message.text())}
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.id} if call.id else {}),
                "function": {
                    "name": change(call.name),
                    "arguments": map_texts(call.arguments, change),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def render_calls(
    render: Callable[[list[Shown]], str], dialogue: Sequence[Shown], write: WriteCalls
) -> str:
    """Render a dialogue, whose calls are written as text where the template shows none.

    Args:
        render: the template.
        dialogue: of `template_message`.
        write: `ToolFormat.write` of the model's format.

    Raises:
        HiddenCallError: the template shows no calls, and the format writes none.
        Exception: what `render` raises.
    """
    if not any("tool_calls" in message for message in dialogue):
        return render(list(dialogue))
    shown = list(dialogue)
    try:
        text = render(shown)
    except Exception:  # noqa: BLE001 - some templates want the arguments as a string of JSON
        shown = with_json_arguments(dialogue)
        text = render(shown)
    renamed = _changed(shown, lambda call: {**call, "name": f"x{call['name']}"})
    if text != render(renamed):
        return text
    return render([_written(message, write) for message in with_json_arguments(dialogue)])


def _written(message: Shown, write: WriteCalls) -> Shown:
    """Return a message whose calls are part of its text."""
    others = dict(message)
    calls = [call["function"] for call in others.pop("tool_calls", ())]
    if not calls:
        return others
    text = write([(call["name"], call["arguments"]) for call in calls])
    if not text:
        raise HiddenCallError(
            "the chat template does not show tool_calls; write the calls into the content, as the "
            "model writes them"
        )
    return {**others, "content": "\n".join(filter(None, (others["content"], text)))}


def with_json_arguments(dialogue: Sequence[Shown]) -> list[Shown]:
    """Return a dialogue whose calls have their arguments as JSON, as OpenAI's API takes them."""

    def write(function: Shown) -> Shown:
        return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}

    return _changed(dialogue, write)


def _changed(dialogue: Sequence[Shown], change: Callable[[Shown], Shown]) -> list[Shown]:
    """Return a dialogue in which the function of every call is changed."""
    return [
        message
        if "tool_calls" not in message
        else {
            **message,
            "tool_calls": [
                {**call, "function": change(call["function"])} for call in message["tool_calls"]
            ],
        }
        for message in dialogue
    ]
