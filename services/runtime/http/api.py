"""HTTP bodies: how every service parses them, answers, and describes both in `/openapi.json`.

Services parse bodies themselves, so that a wrong one is answered in the same words everywhere:
422 and {"detail": what is wrong and where}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from agent_r1.runtime.http.guard import GUARD_ERRORS, OPEN_PATHS

REFERENCE = "#/components/schemas/{model}"
SHOWN_VALUE_CHARS = 100
SHOWN_PROBLEMS = 20
LISTED_PROBLEMS = 1000
"""Most problems of a body that are listed; of one with more, only their number is said: pydantic
writes all of them or none."""
BODY_ERRORS = {
    "408": "The body did not arrive in time.",
    "413": "The body is too large, or holds too many values.",
    "422": "The body does not fit the schema.",
}
"""Errors that every route with a body may answer."""

B = TypeVar("B", bound=BaseModel)


def parse_body(model: type[B], body: bytes) -> B:
    """Parse a JSON body: unknown fields are errors, and so are numbers written as text or truth.

    Raises:
        HTTPException: 422, naming each wrong field with its value.
    """
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as exc:
        raise HTTPException(
            422,
            f"the body is not a {model.__name__}: {_list_problems(exc)}; correct the named fields",
        ) from exc


def _list_problems(error: ValidationError) -> str:
    count = error.error_count()
    if count > LISTED_PROBLEMS:
        return f"{count} problems"
    shown = [
        f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']} "
        f"(got {_shorten(problem['input'])})"
        for problem in error.errors(include_url=False)[:SHOWN_PROBLEMS]
    ]
    if count > SHOWN_PROBLEMS:
        shown.append(f"{count - SHOWN_PROBLEMS} more problems")
    return "; ".join(shown)


def json_response(message: BaseModel | None) -> Response:
    """Return a JSON response of a message; None is an empty object."""
    content = "{}" if message is None else message.model_dump_json()
    return Response(content, media_type="application/json")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_VALUE_CHARS else f"{text[:SHOWN_VALUE_CHARS]}…"


@dataclass(frozen=True)
class Route:
    """One route, as the description of a service says it."""

    path: str
    method: str
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    errors: Mapping[str, str] = field(default_factory=dict[str, str])
    """Statuses beside those of BODY_ERRORS, with what they mean."""
    answer_type: str = "application/json"
    """Media type of the answer."""


def describe(app: Any, routes: tuple[Route, ...]) -> None:
    """Make a FastAPI application describe its routes in full in `GET /openapi.json`.

    Args:
        app: the application; routes that it does not have are left out.
        routes: their bodies and answers, which FastAPI cannot read off the functions.
    """
    described = app.openapi

    def openapi() -> dict[str, Any]:
        complete = app.openapi_schema is not None
        schema: dict[str, Any] = described()
        if not complete:
            _complete(schema, [one for one in routes if one.path in schema["paths"]])
            _add_guard(schema)
        return schema

    app.openapi = openapi


def _complete(schema: dict[str, Any], routes: list[Route]) -> None:
    models = {model for one in routes for model in (one.body, one.answer) if model is not None}
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [(one, "validation") for one in models]
    _, definitions = models_json_schema(modes, ref_template=REFERENCE)
    schema.setdefault("components", {}).setdefault("schemas", {}).update(
        definitions.get("$defs", {})
    )
    for one in routes:
        operation = schema["paths"][one.path][one.method]
        errors = dict(one.errors)
        if one.body is not None:
            operation["requestBody"] = {"required": True, "content": _content(one.body)}
            errors = BODY_ERRORS | errors
        for status, text in errors.items():
            operation["responses"][status] = {"description": text}
        if one.answer is not None:
            operation["responses"]["200"] = {
                "description": one.answer.__name__,
                "content": _content(one.answer, one.answer_type),
            }


def _add_guard(schema: dict[str, Any]) -> None:
    """Add what guard.py asks for and may answer, on every route."""
    bearer = {"type": "http", "scheme": "bearer", "description": "The run token."}
    schema.setdefault("components", {})["securitySchemes"] = {"run_token": bearer}
    for path, operations in schema["paths"].items():
        is_open = path in OPEN_PATHS
        for operation in operations.values():
            operation["security"] = [] if is_open else [{"run_token": []}]
            for status, text in GUARD_ERRORS.items():
                if status != "401" or not is_open:
                    operation["responses"].setdefault(status, {"description": text})


def _content(model: type[BaseModel], media_type: str = "application/json") -> dict[str, Any]:
    reference = REFERENCE.format(model=model.__name__)
    return {media_type: {"schema": {"$ref": reference}}}
