"""Odd schemas of MCP servers: what cannot be checked is left out, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from mcp.shared.message import SessionMessage
from mcp_types.jsonrpc import JSONRPCResponse

from agent_r1.tools.mcp import listing
from agent_r1.tools.mcp.listing import mend_tools
from agent_r1.tools.mcp.schema import MOST_PROBLEMS, relax

OBJECT = {"type": "object"}
JS = r"^\p{L}+$"
TEXT = {"type": "string"}


def of(**properties: Any) -> dict[str, Any]:
    return OBJECT | {"properties": properties}


def deep(levels: int) -> dict[str, Any]:
    """A schema so many objects deep; to check 150 takes more frames than Python has."""
    schema: dict[str, Any] = TEXT
    for _ in range(levels):
        schema = of(a=schema)
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        of(q={"$ref": "#/$defs/Q"}) | {"$defs": {"Q": TEXT}},
        of(q={"$ref": "#/definitions/Q"}) | {"definitions": {"Q": TEXT}},
        of(n={"type": "array", "items": {"$ref": "#/properties/n"}}),
        of(**{"$ref": TEXT, "not": {"enum": [{"$ref": "#/nowhere"}]}}),
        of(n={"minimum": 0, "exclusiveMinimum": True})
        | {"$schema": "http://json-schema.org/draft-04/schema#"},
        OBJECT | {"$id": "https://a/b", "$defs": {"x": {"$id": "x"}}, "allOf": [{"$ref": "x"}]},
    ],
)
def test_a_schema_that_can_be_checked_stays_as_it_is(schema: dict[str, Any]):
    assert relax(schema) == (schema, [])


@pytest.mark.parametrize(
    ("schema", "left", "said"),
    [
        (of(q=TEXT | {"pattern": JS}), of(q=TEXT), "is no regular expression of Python"),
        (of(q={"$ref": "#/$defs/Gone"}), of(q={}), r"leads nowhere \(at \$\.properties\.q\.\$ref"),
        (of(q={"$ref": "http://a.example/q.json"}), of(q={}), "leads nowhere"),
        (of(q={"$ref": "#/title"}) | {"title": "x"}, of(q={}) | {"title": "x"}, "is no schema"),
        (of(q={"$ref": "#/properties/q"}), of(q={}), "leads back to itself"),
        (
            of(r=TEXT) | {"allOf": [{"$ref": "#"}]},
            of(r=TEXT) | {"allOf": [{}]},
            r"'#' leads back to itself through \$\.allOf\.0\.\$ref",
        ),
        # A schema may refer to itself below the value: only the circle at the value goes.
        (
            of(child={"$ref": "#"}) | {"anyOf": [{"$ref": "#"}, {"required": ["child"]}]},
            of(child={"$ref": "#"}) | {"anyOf": [{}, {"required": ["child"]}]},
            r"'#' leads back to itself through \$\.anyOf\.0",
        ),
        (
            of(q={"$ref": "#/$defs/A"}, r=TEXT)
            | {
                "$defs": {
                    "A": {"anyOf": [{"$ref": "#/$defs/B"}, TEXT]},
                    "B": {"allOf": [{"$ref": "#/$defs/A"}]},
                }
            },
            of(q={}, r=TEXT) | {"$defs": {}},
            r"through \$\.\$defs\.A\.anyOf\.0\.\$ref -> \$\.\$defs\.B\.allOf\.0\.\$ref",
        ),
        (OBJECT | {"if": {"not": {"$ref": "#/if"}}}, OBJECT, r"through \$\.if\.not\.\$ref"),
        (
            of(r=TEXT) | {"dependentSchemas": {"r": {"$ref": "#"}}},
            of(r=TEXT),
            "leads back to itself",
        ),
        (deep(400), OBJECT, r"nested too deeply \(at \$\)"),
        (deep(150), OBJECT, r"nested too deeply \(at \$\)"),
        (of(q=None, r=TEXT), of(q={}, r=TEXT), "None is not of type"),
        (of(q={"type": "any"}), of(q={}), "'any' is not valid"),
        (of(n={"minimum": 0, "exclusiveMinimum": True}), of(n={"minimum": 0}), "not of type"),
        (of(q=TEXT) | {"required": None}, of(q=TEXT), r"None is not of type 'array'"),
        (OBJECT | {"$schema": 4}, OBJECT, "4 is not of type 'string'"),
        ({"type": ["object", "null"]}, OBJECT, r"type is \['object', 'null'\]"),
        # What `additionalProperties` would refuse in their place goes with them.
        (
            OBJECT | {"patternProperties": {JS: TEXT}, "additionalProperties": False},
            OBJECT,
            "patternProperties",
        ),
        # Half of a `not` or of a `oneOf` could refuse what the whole allows.
        (of(q={"not": {"pattern": JS}}), of(q={}), "not.pattern"),
        (of(q={"oneOf": [{"pattern": JS}, TEXT]}), of(q={}), "oneOf.0.pattern"),
        (
            of(q={"anyOf": [{"pattern": JS}, {"type": "null"}]}),
            of(q={"anyOf": [{}, {"type": "null"}]}),
            "anyOf.0.pattern",
        ),
        (
            of(q={"$ref": "#/$defs/Q"}, r=TEXT) | {"$defs": {"Q": {"pattern": JS}}},
            of(q={}, r=TEXT) | {"$defs": {}},
            "Q.pattern",
        ),
    ],
)
def test_what_cannot_be_checked_is_left_out_with_its_place(
    schema: dict[str, Any], left: dict[str, Any], said: str
):
    usable, notes = relax(schema)
    assert usable == left
    assert notes != []
    with pytest.raises(ValueError, match=said):
        raise ValueError(notes[0])


@pytest.mark.parametrize("schema", [None, [], {}, "object"])
def test_no_schema_takes_any_object(schema: object):
    assert relax(schema) == (OBJECT, [])


def test_an_odd_entry_of_a_list_leaves_the_others():
    broken = {"type": "object", "properties": {"a": {"$ref": "#/x"}}}
    given = [
        7,
        {"inputSchema": OBJECT},
        {"name": "a", "inputSchema": {}},
        {"name": "b", "inputSchema": OBJECT, "annotations": 3, "outputSchema": broken},
        {"name": "c", "inputSchema": OBJECT, "outputSchema": OBJECT},
    ]
    notes: dict[str, list[str]] = {}
    a, b, c = mend_tools(given, notes)
    assert a == {"name": "a", "inputSchema": OBJECT}
    assert b == {"name": "b", "inputSchema": OBJECT, "annotations": None, "outputSchema": None}
    assert c == given[4]
    assert notes["a"] == notes["c"] == []
    assert "leads nowhere" in notes["b"][0]
    assert notes["b"][1].startswith("annotations: ")


def test_a_schema_with_more_problems_than_are_mended_is_left_to_the_server():
    properties = {f"p{number}": {"$ref": f"#/{number}"} for number in range(MOST_PROBLEMS + 2)}
    usable, notes = relax(of(**properties))
    assert usable == OBJECT
    assert len(notes) == MOST_PROBLEMS + 1
    properties = {f"p{number}": {"$ref": f"#/{number}"} for number in range(MOST_PROBLEMS)}
    assert relax(of(**properties))[0] == of(**{key: {} for key in properties})


async def test_schemas_are_mended_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []

    def mend(tools: list[Any], notes: dict[str, list[str]]) -> list[Any]:
        threads.append(threading.current_thread())
        return tools

    class Stream:
        async def receive(self) -> SessionMessage:
            result = {"tools": [{"name": "echo"}]}
            return SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=1, result=result))

    monkeypatch.setattr(listing, "mend_tools", mend)
    await listing.MendedStream(Stream(), {}).receive()
    (thread,) = threads
    assert thread is not threading.main_thread()
