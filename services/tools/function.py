"""`@tool`: a typed, documented function as a tool.

main.py finds the class of a decorated function by `tool_class_of`, and serves it as any other.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, get_type_hints, overload

from docstring_parser import Docstring, parse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import to_json

from agent_r1.tools.base import Arguments, CallContext, Tool
from agent_r1_proto.tools import ToolResult

Function = TypeVar("Function", bound=Callable[..., Any])

_CLASS = "__agent_r1_tool__"
_REFUSED = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
    inspect.Parameter.POSITIONAL_ONLY: "",
}


class FunctionTool(Tool):
    """Calls a function with the arguments that the model gave."""

    function: ClassVar[Callable[..., Any]]
    arguments: ClassVar[type[BaseModel]]
    """Reads the arguments; the alias of each field is the name of its parameter."""
    context_name: ClassVar[str | None]
    """Parameter that gets the CallContext; None where no parameter asks for it."""

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult | str:
        """Call the function; a plain one runs in a thread, where it may block.

        Raises:
            ValueError: an argument does not fit its type.
        """
        try:
            read = self.arguments.model_validate(arguments)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{where}: {first['msg']}") from exc
        fields = type(read).model_fields
        given = {str(fields[key].alias): getattr(read, key) for key in read.model_fields_set}
        if self.context_name is not None:
            given[self.context_name] = context
        if inspect.iscoroutinefunction(self.function):
            answer = await self.function(**given)
        else:
            answer = await asyncio.to_thread(self.function, **given)
        return answer if _is_answer(answer) else to_json(answer).decode()


def _is_answer(value: Any) -> bool:
    # None is a `return` that was forgotten, and the service says so.
    return value is None or isinstance(value, ToolResult | str)


@overload
def tool(function: Function) -> Function: ...
@overload
def tool(
    *, version: str = "1", idempotent: bool = True, outside_effects: bool = False
) -> Callable[[Function], Function]: ...
def tool(
    function: Function | None = None,
    *,
    version: str = "1",
    idempotent: bool = True,
    outside_effects: bool = False,
) -> Function | Callable[[Function], Function]:
    """Make a tool of a function, which can still be called as before.

    The function's name is the tool's. What the model reads is the docstring: its text, and the text
    of each parameter in the section `Args:`. The annotations become the JSON schema. A parameter
    annotated with `CallContext` gets the context of the call, and the model does not see it. What
    the function returns is the answer: a text or a ToolResult as it is, any other value as JSON.

    Args:
        function: what is called.
        version: recorded with every call.
        idempotent: False: a call that may have run is never sent again.
        outside_effects: True: a call changes something that stays, such as sending a message.

    Raises:
        ValueError: an annotation, the docstring or the text of a parameter is missing.
    """
    said = {"version": version, "idempotent": idempotent, "outside_effects": outside_effects}
    return (lambda one: _as_tool(one, said)) if function is None else _as_tool(function, said)


def tool_class_of(found: object) -> type[Tool] | None:
    """Return the tool of a decorated function; None where it is something else."""
    return getattr(found, _CLASS, None) if inspect.isfunction(found) else None


def _as_tool(function: Function, said: dict[str, str | bool]) -> Function:
    name = function.__name__
    text = parse(inspect.getdoc(function) or "")
    description = "\n\n".join(filter(None, (text.short_description, text.long_description)))
    if not description:
        raise ValueError(
            f"@tool: {name} has no docstring, which the model reads; say in it what {name} does"
        )
    hints = get_type_hints(function, include_extras=True)
    context_name = next((key for key, hint in hints.items() if hint is CallContext), None)
    arguments = _model_of(function, hints, text, context_name)
    body = {
        "name": name,
        "description": description,
        "parameters": _schema(arguments, name),
        **said,
        "function": staticmethod(function),
        "arguments": arguments,
        "context_name": context_name,
        "__doc__": description,
    }
    setattr(function, _CLASS, type(name, (FunctionTool,), body))
    return function


def _model_of(
    function: Callable[..., Any], hints: dict[str, Any], text: Docstring, context_name: str | None
) -> type[BaseModel]:
    """Return the arguments of a function as a model that reads and checks them."""
    name, fields = function.__name__, dict[str, Any]()
    said = {one.arg_name: one.description for one in text.params}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == context_name:
            continue
        if parameter.kind in _REFUSED:
            raise ValueError(
                f"@tool: {name}({_REFUSED[parameter.kind]}{parameter.name}) cannot be called by "
                "name; write an ordinary parameter for each argument"
            )
        if parameter.name not in hints:
            raise ValueError(
                f"@tool: parameter {parameter.name!r} of {name} has no annotation; write its type, "
                f"such as {parameter.name}: str"
            )
        if not said.get(parameter.name):
            raise ValueError(
                f"@tool: the docstring of {name} does not say what {parameter.name!r} is; add a "
                f"line `{parameter.name}: ...` to its section `Args:`"
            )
        is_required = parameter.default is inspect.Parameter.empty
        default = ... if is_required else parameter.default
        # By its alias, a parameter may have a name that pydantic keeps for itself (`model_config`).
        described = Field(default, description=said.pop(parameter.name), alias=parameter.name)
        fields[f"argument_{len(fields)}"] = (hints[parameter.name], described)
    unknown = sorted(said.keys() - {context_name})
    if unknown:
        raise ValueError(
            f"@tool: the docstring of {name} describes {unknown[0]!r}, which is no parameter of "
            "it; correct the name"
        )
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, NameError) as exc:
        why = exc.message if isinstance(exc, PydanticUserError) else exc
        raise ValueError(f"@tool: the annotations of {name} cannot be used: {why}") from exc


def _schema(arguments: type[BaseModel], name: str) -> dict[str, Any]:
    try:
        schema = arguments.model_json_schema()
    except PydanticUserError as exc:
        raise ValueError(
            f"@tool: a parameter of {name} has no JSON schema: {exc.message}; use text, numbers, "
            "lists, dicts, Literal, or a pydantic model"
        ) from exc
    return _without_titles(schema)


def _without_titles(schema: Any) -> Any:
    """Leave out the titles that pydantic makes of names; a property may be called `title`."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(inner) for name, inner in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title"
    }
