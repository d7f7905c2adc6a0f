"""Versions of the configuration: what each key that was renamed is called now.

sources.py translates the `config.json` of an older run with this table, and names the new key to
users who write the old one. Names of built-in classes that have moved are translated as well, by
the table of runtime/user_code.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agent_r1.learner.config import EngineConfig
from agent_r1.runtime.user_code import new_code_name

Key = tuple[str, ...]

CONFIG_VERSION: Final = 2
"""Version of the keys and what they mean. A later one is refused: this release would read it
wrongly."""

_ENGINES = {
    "learner": ("engine",),
    "sft": ("sft", "engine"),
    "train_reward": ("train_reward", "engine"),
}
"""Tables that held the engine's keys, and where these are now."""

RENAMED: dict[Key, Key] = {
    ("learner", "weights_server"): ("learner", "server"),
    ("reward", "judge"): ("reward", "servers", "judge"),
    ("reward", "model"): ("reward", "servers", "reward_model"),
    ("reward", "critic"): ("reward", "servers", "critic"),
    **{
        (table, name): (*engine, name)
        for table, engine in _ENGINES.items()
        for name in EngineConfig.model_fields
    },
}
"""Keys and tables of version 1, and their names now."""


def check_version(version: object, source: str) -> None:
    """Refuse a `config_version` that this release does not read.

    Args:
        version: the value.
        source: where it was written, for the message.

    Raises:
        ValueError: it is a later version, or none.
    """
    known = range(1, CONFIG_VERSION + 1)
    if type(version) is int and version in known:
        return
    named = f"config_version ({version!r}, {source})"
    if type(version) is int and version > CONFIG_VERSION:
        raise ValueError(
            f"{named} must be <= {CONFIG_VERSION}, the newest that this release of agent-r1 reads; "
            "upgrade it"
        )
    raise ValueError(f"{named} must be {' or '.join(map(str, known))}; correct it or leave it out")


def new_name(key: Key) -> Key | None:
    """Return what a key of version 1 is called now; None where it kept its name."""
    for size in range(len(key), 0, -1):
        if key[:size] in RENAMED:
            return (*RENAMED[key[:size]], *key[size:])
    return None


def put(tree: dict[str, Any], key: Key, value: Any) -> None:
    """Set the value at a key of nested tables, making the tables that are missing."""
    for name in key[:-1]:
        inner = tree.get(name)
        if not isinstance(inner, dict):
            inner = tree[name] = {}
        tree = inner
    tree[key[-1]] = value


def translate(values: dict[str, Any]) -> None:
    """Rename the keys of version 1 in nested tables, in place, and built-in classes in values."""
    for key, new in RENAMED.items():
        table: Any = values
        for name in key[:-1]:
            table = table.get(name) if isinstance(table, dict) else None
        if isinstance(table, dict) and key[-1] in table:
            put(values, new, table.pop(key[-1]))
    values |= _with_new_code_names(values)


def _with_new_code_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_new_code_names(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_new_code_names(item) for item in value]
    return new_code_name(value) if isinstance(value, str) else value


def translate_dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key, with the keys of version 1 renamed, and built-in classes."""
    return {
        ".".join(new_name(key) or key): _with_new_code_names(value)
        for key, value in ((tuple(name.split(".")), value) for name, value in values.items())
    }
