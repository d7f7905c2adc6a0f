"""What `GET /openapi.json` of a tool service says: routes with their real bodies and answers.

app.py parses bodies itself (for its own error texts), so FastAPI cannot read the types off.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from agent_r1_proto.tools import CallReply, CallRequest, SessionRequest, ToolHealth, ToolSpec

REFERENCE = "#/components/schemas/{model}"
BODIES: dict[str, type[BaseModel]] = {
    "/call": CallRequest,
    "/open": SessionRequest,
    "/close": SessionRequest,
}
ANSWERS: dict[tuple[str, str], type[BaseModel]] = {
    ("/spec", "get"): ToolSpec,
    ("/healthz", "get"): ToolHealth,
    ("/call", "post"): CallReply,
}
ERRORS = {
    "409": "The call needs a session that is not open here.",
    "413": "The body is too large.",
    "422": "The body does not fit the schema, or names another tool.",
    "503": "Draining, overloaded, or what stands behind the tool is down.",
    "504": "The time is up.",
}


def describe(app: FastAPI) -> None:
    """Make the application describe its routes in full."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(app)
        return app.openapi_schema

    app.openapi = openapi


def _complete(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (model, "validation") for model in {*BODIES.values(), *ANSWERS.values()}
    ]
    _, definitions = models_json_schema(modes, ref_template=REFERENCE)
    schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    for path, body in BODIES.items():
        operation = schema["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": _content(body)}
        for status, text in ERRORS.items():
            operation["responses"][status] = {"description": text}
    for (path, method), answer in ANSWERS.items():
        schema["paths"][path][method]["responses"]["200"] = {
            "description": answer.__name__,
            "content": _content(answer),
        }
    return schema


def _content(model: type[BaseModel]) -> dict[str, Any]:
    reference = REFERENCE.format(model=model.__name__)
    return {"application/json": {"schema": {"$ref": reference}}}
