"""Messages as OpenAI's API and ShareGPT's data sets write them, as fields of a `ChatMessage`.

`ChatMessage` asks before it is validated, so that data files and HTTP bodies may hold either form.
What is left over is refused there by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

_ROLES = {"developer": "system", "function": "tool"}
"""OpenAI's, of which chat templates know nothing."""
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "function_call": "assistant",
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "function", "ipython"), "tool"),
}
_EMPTY: tuple[object, ...] = (None, [], {})
_TEXT_PARTS = ("text", "input_text", "output_text")


def own_fields(value: object) -> object:
    """Return what is given as a message as the fields of a `ChatMessage`, where it is a table.

    Tool calls and the id of the call that a result answers are kept, and a null content beside
    calls is no text. A refusal is what was said. Reasoning becomes a thought at the beginning of
    the text. The name of a speaker is left out, as chat templates do.

    Raises:
        ValueError: it holds what no policy can be shown; the text names the field.
    """
    if not isinstance(value, Mapping):
        return value
    given = cast("Mapping[str, Any]", value)
    fields = _of_sharegpt(given) if "from" in given else dict(given)
    # What the API's own objects have at all times: audio, annotations.
    fields = {k: v for k, v in fields.items() if k == "content" or v not in _EMPTY}
    fields.pop("name", None)
    fields["role"] = _ROLES.get(str(fields.get("role")), fields.get("role"))
    if "function_call" in fields:
        fields["tool_calls"] = [*_items(fields, "tool_calls"), fields.pop("function_call")]
    if "tool_calls" in fields:
        calls = enumerate(_items(fields, "tool_calls"))
        fields["tool_calls"] = [_call(i, call) for i, call in calls]
    fields["content"] = _content(fields)
    return fields


def own_dialogue(value: object) -> object:
    """Return a line of a data set of dialogues as `messages` and `tools`, where it is a table.

    ShareGPT has `conversations`, and `system` beside them; some data sets keep the tools as JSON,
    or as the `functions` that OpenAI's API had before.

    Raises:
        ValueError: the tools are no JSON.
    """
    if not isinstance(value, Mapping):
        return value
    fields = dict(cast("Mapping[str, Any]", value))
    fields.pop("parallel_tool_calls", None)
    for name in ("conversations", "conversation"):
        if name in fields and "messages" not in fields:
            fields["messages"] = fields.pop(name)
    if "functions" in fields and "tools" not in fields:
        functions = _items(fields, "functions")
        fields["tools"] = [{"type": "function", "function": one} for one in functions]
        del fields["functions"]
    if isinstance(fields.get("tools"), str):
        fields["tools"] = _json(fields["tools"] or "null", "tools")
    system = fields.get("system")
    if isinstance(system, str) and isinstance(fields.get("messages"), list):
        told = [{"role": "system", "content": system}] if system else []
        fields["messages"] = [*told, *fields["messages"]]
        del fields["system"]
    return fields


def _of_sharegpt(given: Mapping[str, Any]) -> dict[str, Any]:
    speaker, said = given["from"], given.get("value")
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise ValueError(f"from ({speaker!r}) must be one of {', '.join(_SHAREGPT_ROLES)}")
    others = {name: value for name, value in given.items() if name not in ("from", "value")}
    fields = {**others, "role": _SHAREGPT_ROLES[speaker], "content": said}
    if speaker != "function_call":
        return fields
    calls = _json(said, "value of a function_call")
    listed = cast("list[Any]", calls) if isinstance(calls, list) else [calls]
    return {**fields, "content": None, "tool_calls": listed}


def _call(index: int, given: object) -> object:
    """Return one call; arguments are a table, or the JSON of one, as the API writes them."""
    where = f"tool_calls.{index}"
    if not isinstance(given, Mapping):
        return given
    call = cast("Mapping[str, Any]", given)
    function = _table(call.get("function", call), f"{where}.function")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", f"{where}.function.arguments")
    return {
        "name": function.get("name"),
        "arguments": _table(arguments, f"{where}.function.arguments"),
        "id": call.get("id") or "",
    }


def _content(fields: dict[str, Any]) -> object:
    """Take out the fields that make the content, and return it."""
    reasons = [fields.pop(name, None) for name in ("reasoning_content", "reasoning")]
    reasoning = next((one for one in reasons if one), None)
    refusal = fields.pop("refusal", None)
    content = fields.get("content") or refusal or fields.get("content")
    if refusal and content != refusal:
        raise ValueError("refusal stands beside a content; keep the one that the assistant said")
    if content is None:
        if "tool_calls" not in fields and reasoning is None:
            raise ValueError(
                "content is null or missing, and there are no tool_calls; write a text, or remove "
                "the message"
            )
        content = ""
    if isinstance(content, list):
        content = [_part(i, part) for i, part in enumerate(cast("list[Any]", content))]
    if reasoning is None:
        return content
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise ValueError("reasoning_content must be a text beside a content of text")
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"


def _part(index: int, part: object) -> object:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        return part
    given = cast("Mapping[str, Any]", part)
    kind = given.get("type")
    if kind in _TEXT_PARTS and isinstance(given.get("text"), str):
        return {"type": "text", "text": given["text"]}
    if kind == "refusal" and isinstance(given.get("refusal"), str):
        return {"type": "text", "text": given["refusal"]}
    if kind not in (*_TEXT_PARTS, "image") or "image_url" in given:
        raise ValueError(
            f"content.{index} ({kind}) cannot be shown to the policy, which reads text alone; "
            "write text in its place, such as a description"
        )
    return given


def _items(fields: Mapping[str, Any], name: str) -> list[Any]:
    value: object = fields.get(name) or list[Any]()
    if not isinstance(value, list):
        raise ValueError(f"{name} ({value!r:.80}) must be a list")
    return cast("list[Any]", value)


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} ({value!r:.80}) must be a JSON object")
    return cast("Mapping[str, Any]", value)


def _json(text: object, where: str) -> Any:
    try:
        return json.loads(str(text))
    except ValueError as exc:
        raise ValueError(f"{where} ({text!r:.80}) is no JSON: {exc}") from exc
