"""Schemas that nobody can check whole: what is odd in them raises nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.runtime.argument_schema import find_error, find_problem, make_validator

DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    "schema",
    [
        # `$defs` is no keyword of draft 7, so nothing in it is looked at before it is used.
        {
            "$schema": DRAFT_7,
            "properties": {"q": {"$ref": "#/$defs/letters"}},
            "$defs": {"letters": {"type": "string", "pattern": r"^\p{L}+$"}},
        },
        {
            "properties": {"q": {"$ref": "#/components/schemas/text"}},
            "components": {"schemas": {"text": {"type": "String"}}},
        },
        {"properties": {"q": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"if": {"$ref": "#/$defs/a"}}}},
    ],
    ids=["a pattern of another language", "an unknown type", "a reference to itself"],
)
def test_what_a_schema_cannot_check_is_left_to_the_tool(schema: dict[str, Any]):
    if find_problem(schema) is None:
        assert find_error(make_validator(schema), {"q": "x"}) is None


def test_a_circle_is_said_of_the_schema_and_no_longer_of_the_arguments():
    schema: dict[str, Any] = {"properties": {"q": {"$ref": "#/$defs/a"}}}
    schema["$defs"] = {"a": {"if": {"$ref": "#/$defs/a"}}}
    assert "leads back to itself through $.$defs.a.if.$ref" in str(find_problem(schema))
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    assert find_problem(tree) is None
    assert find_error(make_validator(tree), {"left": {"right": {}}}) is None


def test_a_name_that_is_looked_up_in_a_list_leads_nowhere():
    schema = {"properties": {"q": {"$ref": "#/examples/first"}}, "examples": [{"type": "string"}]}
    problem = find_problem(schema)
    assert problem is not None
    assert "'#/examples/first' leads nowhere" in str(problem)
