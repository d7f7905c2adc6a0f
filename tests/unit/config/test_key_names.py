"""Keys that messages and documents of the code name: each one is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.config.run import Config
from agent_r1.config.sources import field_annotation, known_keys

REPOSITORY = Path(__file__).resolve().parents[3]
ANY = "{}"
"""Stands for what a message puts in."""
NAMED = re.compile(
    rf"(?<![\w./`\"'-])(?:{'|'.join(Config.model_fields)})(?:\.(?:[a-z_0-9]+|\{{\}}))+(?![\w(/{{])"
)
OF_MODELS = ("model.base_url", "model.api_key", "model.name")
"""Of the `Model` that an agent asks."""
FILES = (".py", ".toml", ".json", ".conf", ".lock")
KEYS = list(known_keys(Config))


def is_key(name: str) -> bool:
    """Return whether a name is one of a key or table, or lies in a field of free names."""
    parts = name.split(".")
    return any(is_below(parts, key) or begins(parts, key) for key in KEYS)


def begins(parts: list[str], key: tuple[str, ...]) -> bool:
    pairs = list(zip(parts, key, strict=False))
    return len(parts) <= len(key) and all(
        part in (ANY, known) or known == "<name>" for part, known in pairs
    )


def is_below(parts: list[str], key: tuple[str, ...]) -> bool:
    pairs = list(zip(parts, key, strict=False))
    named = all(known in (part, "<name>") for part, known in pairs)
    return named and len(parts) > len(key) and has_free_names(key)


def has_free_names(key: tuple[str, ...]) -> bool:
    named = tuple("x" if part == "<name>" else part for part in key)
    return "dict[" in str(field_annotation(Config, named))


def texts(file: Path) -> Iterator[str]:
    """Yield the texts of a file that hold more than a word."""
    for node in ast.walk(ast.parse(file.read_text())):
        text = ""
        if isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else ANY for one in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if " " in text:
            yield text


@pytest.mark.parametrize(
    "folder", ["config", "cli", "learner", "rollout", "gateway", "reward", "tools"]
)
def test_messages_name_keys_that_are_there(folder: str):
    found = {
        (name, file.name)
        for file in (REPOSITORY / "services" / folder).rglob("*.py")
        for text in texts(file)
        for name in NAMED.findall(text)
        if not name.endswith(("_", *FILES)) and not is_key(name) and name not in OF_MODELS
    }
    assert found == set()


def test_a_key_that_is_not_there_is_found():
    (name,) = NAMED.findall("reward.{}.path (x) is not a folder")
    assert not is_key(name)
    assert not is_key("learner.weights_server.port")
    assert is_key("reward.servers.{}.path")
    assert is_key("tools.search.settings.anything")
