"""Schemas of MCP servers, made usable: what cannot be checked here is left to the server.

`listing.py` reads schemas from a server's list of tools and gives them to `relax`.
"""

from __future__ import annotations

import copy
from typing import Any

from agent_r1.runtime.argument_schema import TOO_DEEP, Path, find_problem

_INWARDS = {"properties": 2, "items": 1, "additionalProperties": 1}
_INWARDS |= {"allOf": 2, "anyOf": 2, "prefixItems": 2}
"""Keywords that lead to a schema in so many steps. Less in that schema never refuses more; in one
below `not`, `if` or `oneOf` it might."""
_DEFINITIONS = ("$defs", "definitions")
_COUNTERPARTS = {
    "properties": "additionalProperties",
    "patternProperties": "additionalProperties",
    "prefixItems": "items",
    "items": "additionalItems",
}
"""Keywords that would take over what another one without its counterpart leaves."""


MOST_PROBLEMS = 20
"""Problems of one schema that are mended; the whole is looked at again for each."""


def relax(schema: object) -> tuple[dict[str, Any], list[str]]:
    """Leave out of a schema what arguments cannot be checked with.

    Returns:
        A schema of an object that refuses nothing the given one allows, and what was left out.
    """
    try:
        usable = copy.deepcopy(schema) if isinstance(schema, dict) else {}
    except RecursionError:
        return {"type": "object"}, [f"{TOO_DEEP} (at $)"]
    notes: list[str] = []
    if usable.get("type") != "object":
        notes += [f"type is {usable['type']!r} (at $.type)"] if "type" in usable else []
        usable["type"] = "object"  # arguments are an object, whatever a schema leaves out
    while (problem := find_problem(usable)) is not None:
        notes.append(str(problem))
        if not problem.path or len(notes) > MOST_PROBLEMS:
            return {"type": "object"}, notes
        _leave_out(usable, problem.path)
    return usable, notes


def _leave_out(schema: dict[str, Any], path: Path) -> None:
    """Remove the keyword at a path, or the innermost one around it that may be missed."""
    node, (key, *rest) = _innermost(schema, path)
    node.pop("unevaluatedProperties", None)
    node.pop("unevaluatedItems", None)
    if key in _DEFINITIONS and rest and isinstance(node[key], dict):
        del node[key][rest[0]]  # what refers to it is left out next
    elif key == "properties" and len(rest) == 1:
        node[key][rest[0]] = {}
    else:
        del node[key]
        node.pop(_COUNTERPARTS.get(str(key), ""), None)


def _innermost(schema: dict[str, Any], path: Path) -> tuple[dict[Any, Any], Path]:
    while True:
        width = _INWARDS.get(str(path[0]), 0)
        inner: Any = schema
        for step in path[:width]:
            inner = inner[step]
        if not width or len(path) <= width or not isinstance(inner, dict):
            return schema, path
        schema, path = inner, path[width:]
