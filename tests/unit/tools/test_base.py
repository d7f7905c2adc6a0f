"""`Tool`: what a user's subclass must have, and what it gets for free."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.tools.base import Arguments, CallContext, Tool
from agent_r1_proto.tools import ToolResult

CONTEXT = CallContext(rollout_id="r/0/0/0/0", turn=0, tool_context=None, timeout_s=1.0)
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Echo(Tool):
    name = "echo"
    description = "Repeats."
    parameters = NO_ARGUMENTS

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        if "bad" in arguments:
            raise LookupError("no such page")
        return f"{arguments['text']} in turn {context.turn}"


def test_spec_carries_the_class_attributes():
    spec = Echo().spec()
    assert (spec.name, spec.version, spec.sessions) == ("echo", "1", False)
    assert spec.as_function()["function"]["parameters"] == NO_ARGUMENTS


async def test_call_batch_answers_in_order_and_keeps_exceptions_apart():
    answers = await Echo().call_batch(
        [({"text": "a"}, CONTEXT), ({"bad": True}, CONTEXT), ({"text": "c"}, CONTEXT)]
    )
    assert answers[0] == "a in turn 0"
    assert isinstance(answers[1], LookupError)
    assert answers[2] == "c in turn 0"


def subclass(**attributes: Any) -> Tool:
    async def call(self: Tool, arguments: Arguments, context: CallContext) -> ToolResult:
        return ToolResult()

    defaults = {"name": "t", "description": "d", "parameters": NO_ARGUMENTS, "call": call}
    return type("Mine", (Tool,), defaults | attributes)()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"parameters": {"type": "array"}}, r'Mine\.parameters must be .* "type": "object"'),
        ({"parameters": {"type": "object", "required": "query"}}, "not a valid JSON Schema"),
        (
            {"parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/B"}}}},
            r"'#/\$defs/B' leads nowhere \(at \$\.properties\.a\.\$ref\); correct that place",
        ),
        ({"name": "two words"}, r"name \('two words'\)"),
        ({"max_batch": 0}, r"max_batch \(0\)"),
        ({"call": lambda self, arguments, context: "x"}, "call is not async; write `async def"),
    ],
)
def test_a_wrong_attribute_is_named_with_its_value(attributes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        subclass(**attributes).spec()


async def of_one(self: Tool, context: Any) -> None: ...


async def of_none(self: Tool) -> None: ...


async def of_two_and_more(self: Tool, arguments: Any, context: Any, more: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("method", "wrong", "right"),
    [
        ("open", of_one, "async def open(self, rollout_id, tool_context)"),
        ("call", of_one, "async def call(self, arguments, context)"),
        ("close", of_none, "async def close(self, rollout_id)"),
        ("start", of_one, "async def start(self)"),
    ],
)
def test_a_method_that_the_service_cannot_call_is_refused_with_its_signature(
    method: str, wrong: Any, right: str
):
    with pytest.raises(ValueError, match=rf"Mine: {method}\(") as caught:
        subclass(**{method: wrong}).spec()
    assert f"write `{right}`" in str(caught.value)


def test_a_method_may_take_more_than_the_service_gives():
    assert subclass(call=of_two_and_more).spec().name == "t"


def test_a_missing_attribute_is_named():
    class Nameless(Tool):
        description = "d"
        parameters = NO_ARGUMENTS

        async def call(self, arguments: Arguments, context: CallContext) -> str:
            return ""

    with pytest.raises(ValueError, match="Nameless lacks 'name'"):
        Nameless().spec()
