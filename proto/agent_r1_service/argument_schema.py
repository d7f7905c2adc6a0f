"""Schemas of tools' arguments: whether one can be used, and which arguments do not fit it.

Tool classes, the tool service and rollout all check here, so a schema that one of them accepts
cannot fail in another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
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
_NOWHERE: Registry[Any] = Registry()
"""References lead to places in the schema itself; nothing is fetched."""

_COMPARED_ERRORS = 100
"""Of so many errors the most telling is shown; arguments may have one for each value."""

_EXCEPTIONS: Any = exceptions
"""jsonschema's, whose types are incomplete."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class SchemaProblem:
    """What makes a schema unusable."""

    path: Path
    """Where in the schema."""
    message: str

    def __str__(self) -> str:
        """Return the message with the place."""
        return f"{self.message} (at {'.'.join(map(str, ('$', *self.path)))})"


def find_problem(schema: dict[str, Any]) -> SchemaProblem | None:
    """Return what keeps arguments from being checked with a schema; None where nothing does."""
    kind = _kind_of(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as exc:
        return SchemaProblem(tuple(exc.absolute_path), _explain(exc))
    return _reference_problem(schema, kind)


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
    return None


def _references(resource: Resource[Any], resolver: Any) -> Iterator[tuple[str, Any]]:
    for key in _REFERENCES:
        reference = _items(resource.contents).get(key)
        if isinstance(reference, str):
            yield reference, resolver
    for inner in resource.subresources():
        yield from _references(inner, resolver.in_subresource(inner))


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
            return "leads back to itself"
        seen.add(place)
        resolver, following = found.resolver, items.get("$ref")
        if not isinstance(following, str):
            return None
        reference = following


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
