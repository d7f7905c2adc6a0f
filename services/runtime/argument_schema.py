"""Schemas of tools' arguments: whether one can be used, and which arguments do not fit it.

Tool classes, the tool service and rollout all check here, so a schema that one of them accepts
cannot fail in another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import islice, pairwise
from typing import Any

import jsonschema
import jsonschema.validators
import referencing.jsonschema
from jsonschema import exceptions
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator
from jsonschema_specifications import (  # pyright: ignore[reportMissingTypeStubs]
    REGISTRY as SPECIFICATIONS,
)
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable

logger = logging.getLogger(__name__)

_REFERENCES = ("$ref", "$dynamicRef")
_APPLIED = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_APPLIED_IF_PRESENT = ("dependentSchemas", "dependencies")
"""Keywords whose schemas judge the same value as the schema that they stand in."""
_NOWHERE: Registry[Any] = Registry()
"""References lead to places in the schema itself; nothing is fetched."""

TOO_DEEP = "the schema is nested too deeply"

_COMPARED_ERRORS = 100
"""Of so many errors the most telling is shown; arguments may have one for each value."""

_EXCEPTIONS: Any = exceptions
"""jsonschema's, whose types are incomplete."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class SchemaProblem:
    """Reason why a schema is unusable."""

    path: Path
    """Path in the schema."""
    message: str

    def __str__(self) -> str:
        """Return the message with the place."""
        return f"{self.message} (at {'.'.join(map(str, ('$', *self.path)))})"


def find_problem(schema: dict[str, Any]) -> SchemaProblem | None:
    """Return what keeps arguments from being checked with a schema; None where nothing does."""
    kind = _kind_of(schema)
    try:
        kind.check_schema(schema)
        return _reference_problem(schema, kind)
    except jsonschema.SchemaError as exc:
        return SchemaProblem(tuple(exc.absolute_path), _explain(exc))
    except RecursionError:
        return SchemaProblem((), TOO_DEEP)


def make_validator(schema: dict[str, Any]) -> Validator:
    """Return what checks arguments, by the draft that the schema names or else 2020-12."""
    return _kind_of(schema)(schema, registry=_NOWHERE)


def find_error(validator: Validator, arguments: Any) -> ValidationError | None:
    """Return why arguments do not fit; None if they do."""
    try:
        errors = islice(validator.iter_errors(arguments), _COMPARED_ERRORS)
        return _EXCEPTIONS.best_match(errors)
    except RecursionError:
        return ValidationError("the arguments are nested too deeply")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # noqa: BLE001 - references panic in Rust, which is no Exception
        # What a schema cannot check, whatever is odd in it, is left to the tool.
        logger.warning("arguments not checked, because of the tool's schema error=%r", exc)
        return None


def holds_more_than(limit: int, value: object) -> bool:
    """Say whether a JSON value has more than so many values in it."""
    left, count = [value], 0
    while left and count <= limit:
        inner = _items(left.pop()).values()
        count += len(inner)
        left += inner
    return count > limit


def _kind_of(schema: dict[str, Any]) -> type[Validator]:
    default: Any = jsonschema.Draft202012Validator
    named = schema.get("$schema")
    is_named = isinstance(named, str)
    return jsonschema.validators.validator_for(schema, default) if is_named else default


def _explain(error: jsonschema.SchemaError) -> str:
    if error.validator == "format" and error.validator_value == "regex":
        return f"{error.instance!r} is no regular expression of Python's module re"
    return error.message


def _reference_problem(schema: dict[str, Any], kind: Any) -> SchemaProblem | None:
    draft = referencing.jsonschema.specification_with(kind.ID_OF(kind.META_SCHEMA))
    root: Resource[Any] = draft.create_resource(schema)
    resolver: Any = SPECIFICATIONS.combine(_NOWHERE).resolver_with_root(root)
    for reference, where in _references(root, resolver):
        problem = _target_problem(reference, where)
        if problem is not None:
            place = next(_places(schema, reference), ())
            return SchemaProblem(place, f"the reference {reference!r} {problem}")
    return _circle_problem(schema, root, resolver)


def _references(resource: Resource[Any], resolver: Any) -> Iterator[tuple[str, Any]]:
    for one, where in _resources(resource, resolver):
        for key in _REFERENCES:
            reference = _items(one.contents).get(key)
            if isinstance(reference, str):
                yield reference, where


def _resources(resource: Resource[Any], resolver: Any) -> Iterator[tuple[Resource[Any], Any]]:
    yield resource, resolver
    for inner in resource.subresources():
        yield from _resources(inner, resolver.in_subresource(inner))


def _target_problem(reference: str, resolver: Any) -> str | None:
    seen: set[int] = set()
    while True:
        try:
            found: Any = resolver.lookup(reference)
        except (Unresolvable, ValueError, TypeError):  # also a name that is looked up in a list
            return "leads nowhere"
        place, items = id(found.contents), _items(found.contents)
        if not isinstance(found.contents, dict | bool):
            return "leads to something that is no schema"
        if place in seen:
            return None  # `_circle_problem` says so
        seen.add(place)
        resolver, following = found.resolver, items.get("$ref")
        if not isinstance(following, str):
            return None
        reference = following


def _circle_problem(schema: Any, root: Resource[Any], resolver: Any) -> SchemaProblem | None:
    """Find references that lead back to where they stand without going into the value."""
    ways = _ways(root, resolver)
    try:
        TopologicalSorter(ways).prepare()
    except CycleError as exc:
        circle: list[int] = exc.args[1][::-1]  # it is said from the end to the beginning
    else:
        return None
    known = dict(_nodes(schema))
    steps = [(ways[at][to], known.get(at, ("...",))) for at, to in pairwise(circle)]
    references = [(text, (*place, *way)) for (text, way), place in steps if text is not None]
    through = " -> ".join(".".join(map(str, ("$", *path))) for _, path in references)
    text, path = references[-1]
    return SchemaProblem(path, f"the reference {text!r} leads back to itself through {through}")


def _ways(root: Resource[Any], resolver: Any) -> dict[int, dict[int, tuple[str | None, Path]]]:
    """Return to which schemas each leads that judge the same value, by identity.

    With each way comes its reference, or None where it is none.
    """
    ways: dict[int, dict[int, tuple[str | None, Path]]] = {}
    found = [(one.contents, where) for one, where in _resources(root, resolver)]
    for node, where in found:  # grows by what only references lead to
        if id(node) not in ways:
            is_schema = issubclass(type(node), dict)  # a list is of property names
            applied = list(_applied(node, where)) if is_schema else []
            ways[id(node)] = {
                id(to): (node.get(way[-1]) if way[-1] in _REFERENCES else None, way)
                for way, to, _ in applied
            }
            found += [(inner, there) for _, inner, there in applied]
    return ways


def _applied(node: Any, resolver: Any) -> Iterator[tuple[Path, Any, Any]]:
    """Yield the schemas that judge the same value as a schema, each with the way there."""
    for key in _REFERENCES:
        # What leads nowhere was found before, unless it is where no keyword leads.
        with suppress(Unresolvable, ValueError, TypeError, KeyError):
            found = resolver.lookup(node[key])
            yield (key,), found.contents, found.resolver
    for key in (*_APPLIED, *_APPLIED_IF_PRESENT):
        inner = node.get(key)
        if isinstance(inner, dict) and key in _APPLIED:
            yield (key,), inner, resolver
        else:
            for name, one in _items(inner).items():
                yield (key, name), one, resolver


def _nodes(value: object, path: Path = ()) -> Iterator[tuple[int, Path]]:
    yield id(value), path
    for key, inner in _items(value).items():
        yield from _nodes(inner, (*path, key))


def _places(value: object, reference: str, path: Path = ()) -> Iterator[Path]:
    for key, inner in _items(value).items():
        if key in _REFERENCES and inner == reference:
            yield (*path, key)
        yield from _places(inner, reference, (*path, key))


def _items(value: Any) -> dict[Any, Any]:
    """Return what a value holds, by name or number; nothing of what holds nothing."""
    if isinstance(value, list):
        return dict(enumerate(value))  # pyright: ignore[reportUnknownArgumentType]
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]
