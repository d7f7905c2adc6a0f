"""The model's tokenizer and its chat template: loaded, and asked to render dialogues.

chat_format.py makes tokens of the renderings, and template_checks.py looks at them at the start.
The learner renders demonstrations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1.text.control_tokens import map_texts
from agent_r1_proto.tasks import ChatMessage

Shown = dict[str, Any]
"""A message as a template takes it."""
WriteCalls = Callable[[Sequence[tuple[str, str]]], str]
"""Writes calls (name, and arguments as JSON) as a model does."""


class ChatTemplateError(ValueError):
    """The model's chat template or tokenizer cannot be used token by token."""


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer of a Hugging Face model directory.

    Raises:
        ChatTemplateError: there is none, it has no chat template or it is not a fast one.
    """
    from transformers import AutoTokenizer  # seconds to import; tests with fakes do without

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    except (OSError, ValueError) as exc:
        raise ChatTemplateError(
            f"model.path ({model_path}) has no tokenizer that transformers can load: {exc}"
        ) from exc
    if not getattr(tokenizer, "is_fast", False):
        raise ChatTemplateError(
            f"the tokenizer of model.path ({model_path}) has no tokenizer.json; convert it to a "
            "fast tokenizer with transformers and save it beside the model"
        )
    if not tokenizer.chat_template:
        raise ChatTemplateError(
            f"the tokenizer of model.path ({model_path}) has no chat template; put a "
            "chat_template.jinja beside the model"
        )
    return tokenizer


def read_end_tokens(directory: Path) -> tuple[int, ...]:
    """Return the end-of-turn tokens of the model in a directory.

    Raises:
        ChatTemplateError: it names none, or has no usable config.json.
    """
    from transformers import AutoConfig  # seconds to import

    generation = directory / "generation_config.json"
    found: Any = None
    if generation.is_file():
        found = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
    if found is None:
        try:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        except (OSError, ValueError) as exc:
            raise ChatTemplateError(
                f"model.path ({directory}) has no usable config.json: {exc}"
            ) from exc
        found = config.get_text_config().eos_token_id
    ids = (found,) if isinstance(found, int) else tuple(sorted(set(found or ())))
    if not ids:
        raise ChatTemplateError(
            f"{directory} names no end-of-turn token; set eos_token_id in its "
            "generation_config.json"
        )
    return ids


def render(tokenizer: Any, dialogue: Sequence[Mapping[str, Any]], what: str, **options: Any) -> str:
    """Render a dialogue as text with the model's chat template.

    Raises:
        ChatTemplateError: the template cannot; `what` says what was to be rendered.
    """
    try:
        return tokenizer.apply_chat_template(dialogue, tokenize=False, **options)
    except Exception as exc:  # a template is code: a wrong key or index raises what Python does
        raise ChatTemplateError(f"the chat template cannot render {what}: {exc}") from exc


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
        ChatTemplateError: the template shows no calls, and the format writes none.
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
        raise ChatTemplateError(
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
