"""`@tool`: what the model reads of a function, and how it is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from agent_r1 import CallContext, Tool, ToolResult, tool
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.function import tool_class_of
from agent_r1.tools.loading import load_tool

CONTEXT = CallContext(rollout_id="r/0/1/2/0", turn=0, tool_context={"city": "Rome"}, timeout_s=5.0)


class Place(BaseModel):
    lat: float
    title: str = "here"


@tool
def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """Tells the weather of a city.

    It knows no other planet.

    Args:
        city: name of the city,
            without its country.
        days: days from today.
        unit: of the temperature.
    """
    return f"{city} +{days}: 20 {unit}"


def served(function: Any) -> Tool:
    found = tool_class_of(function)
    assert found is not None
    return found()


def test_the_model_reads_the_docstring_and_the_annotations():
    spec = served(weather).spec()
    assert (spec.name, spec.version) == ("weather", "1")
    assert spec.description == "Tells the weather of a city.\n\nIt knows no other planet."
    assert spec.parameters == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "city": {"type": "string", "description": "name of the city,\nwithout its country."},
            "days": {"type": "integer", "default": 1, "description": "days from today."},
            "unit": {
                "type": "string",
                "enum": ["C", "F"],
                "default": "C",
                "description": "of the temperature.",
            },
        },
        "required": ["city"],
    }


async def test_a_function_is_called_with_what_the_model_gave_and_as_before():
    assert await served(weather).call({"city": "Rome", "unit": "F"}, CONTEXT) == "Rome +1: 20 F"
    assert weather("Rome") == "Rome +1: 20 C"


async def test_arguments_have_the_types_of_their_annotations_and_the_context_is_not_one():
    @tool(version="2", idempotent=False, outside_effects=True)
    async def near(place: Place, context: CallContext) -> dict[str, Any]:
        """Finds what is near.

        Args:
            place: where to look.
            context: of the call.
        """
        assert isinstance(place, Place)
        return {"near": place.title, "from": context.tool_context}

    made = served(near)
    spec = made.spec()
    assert (spec.version, spec.idempotent, spec.outside_effects) == ("2", False, True)
    assert list(spec.parameters["properties"]) == ["place"]
    # A property may be called `title`; the titles that pydantic adds are left out.
    assert list(spec.parameters["$defs"]["Place"]["properties"]) == ["lat", "title"]
    answer = await made.call({"place": {"lat": 1.5}}, CONTEXT)
    assert answer == '{"near":"here","from":{"city":"Rome"}}'
    with pytest.raises(ValueError, match=r"place\.lat: Field required"):
        await made.call({"place": {}}, CONTEXT)


async def test_a_parameter_may_have_any_name():
    @tool
    def reserved(
        model_config: str, schema: int, _private: str = "p", model_fields: str = "f"
    ) -> list[Any]:
        """Answers what it got.

        Args:
            model_config: a name that pydantic keeps for itself.
            schema: one of its methods.
            _private: a name that pydantic refuses.
            model_fields: another that it keeps.
        """
        return [model_config, schema, _private, model_fields]

    made = served(reserved)
    parameters = made.spec().parameters
    names = ["model_config", "schema", "_private", "model_fields"]
    assert list(parameters["properties"]) == names
    assert parameters["required"] == ["model_config", "schema"]
    given = {"model_config": "a", "schema": 1, "_private": "b"}
    assert await made.call(given, CONTEXT) == '["a",1,"b","f"]'
    with pytest.raises(ValueError, match="schema: Input should be a valid integer"):
        await made.call({"model_config": "a", "schema": "x"}, CONTEXT)


async def test_texts_and_results_are_answered_as_they_are_and_none_is_no_answer():
    @tool
    def echo(value: ToolResult | str | None) -> object:
        """Answers what it got.

        Args:
            value: anything.
        """
        return value

    made = served(echo)
    assert await made.call({"value": "text"}, CONTEXT) == "text"
    assert await made.call({"value": None}, CONTEXT) is None  # which the service calls a bug


def no_docstring(city: str) -> str:
    return city


def no_annotation(city) -> str:
    """Finds.

    Args:
        city: its name.
    """
    return city


def no_text(city: str) -> str:
    """Finds."""
    return city


def wrong_text(city: str) -> str:
    """Finds.

    Args:
        city: its name.
        town: its name.
    """
    return city


def many(*cities: str) -> str:
    """Finds.

    Args:
        cities: their names.
    """
    return ""


def odd(city: Path | object) -> str:
    """Finds.

    Args:
        city: its name.
    """
    return str(city)


class Opaque:
    pass


def opaque(city: Opaque) -> str:
    """Finds.

    Args:
        city: its name.
    """
    return str(city)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_docstring, "no_docstring has no docstring"),
        (no_annotation, "parameter 'city' of no_annotation has no annotation; write its type"),
        (no_text, "does not say what 'city' is; add a line `city: ...` to its section `Args:`"),
        (wrong_text, "describes 'town', which is no parameter of it"),
        (many, r"many\(\*cities\) cannot be called by name"),
        (opaque, "the annotations of opaque cannot be used"),
    ],
)
def test_what_the_model_would_miss_is_an_error(function: Any, said: str):
    with pytest.raises(ValueError, match=said):
        tool(function)


def test_a_table_names_a_function_as_it_names_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_functions.py").write_text(
        "from agent_r1 import tool\n"
        "@tool\n"
        "def double(number: float) -> float:\n"
        '    """Doubles a number.\n\n    Args:\n        number: to double.\n    """\n'
        "    return 2 * number\n"
        "def plain(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_functions", raising=False)
    assert load_tool("double", ToolConfig(type="my_functions:double")).spec().name == "double"
    with pytest.raises(ValueError, match=r"write @agent_r1\.tool above it"):
        load_tool("plain", ToolConfig(type="my_functions:plain"))
    with pytest.raises(ValueError, match=r"\[tools\.other\] serves .*, whose name is 'double'"):
        load_tool("other", ToolConfig(type="my_functions:double"))
    sys.modules.pop("my_functions")
