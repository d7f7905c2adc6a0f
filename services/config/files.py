"""Configuration files: read, with the files that they extend, and their version checked.

The `config.json` of a run folder may be of an older version: its keys are translated here.

sources.py asks for the chain of a file, lays later files over earlier ones, and reads variables and
options after them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_r1.config.versions import CONFIG_VERSION, translate
from agent_r1.runtime.files.file_formats import read_text

EXTENDS = "extends"
VERSION_KEY = "config_version"


class ConfigError(ValueError):
    """A configuration that cannot be used; says value, limit and remedy."""


def read_file(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON configuration file.

    Raises:
        ConfigError: it is missing or does not parse.
    """
    try:
        text = read_text(path)
    except FileNotFoundError as exc:
        raise ConfigError(f"no configuration file {path}; name an existing .toml file") from exc
    except IsADirectoryError as exc:
        raise ConfigError(
            f"{path} is a folder; name the configuration file in it (config.json in a run folder)"
        ) from exc
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"cannot read the configuration file {path}: {why}") from exc
    try:
        if path.suffix == ".json":
            values = json.loads(text)
            if not isinstance(values, dict):
                raise ConfigError(f"{path} is not a JSON object; name a run's config.json")
            return values
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as exc:
        raise ConfigError(f"{path} does not parse: {exc}") from exc


def read_chain(file: Path, above: Sequence[Path] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """Read a file and those that it extends: the last one is the file, which has the last word.

    Args:
        file: to read.
        above: files that led here by `extends`.

    Raises:
        ConfigError: a file is missing or does not parse, extends itself, or is of a later version.
    """
    where = file.resolve()
    if where in above:
        chain = " -> ".join(str(one) for one in (*above[above.index(where) :], where))
        raise ConfigError(f"{EXTENDS} goes round in a circle: {chain}; remove one of them")
    values = read_file(file)
    _check_version(values, file)
    base = values.pop(EXTENDS, None)
    if base is None:
        return [(file, values)]
    if not isinstance(base, str):
        raise ConfigError(
            f'{EXTENDS} ({base!r}, {file}) must name one file; write {EXTENDS} = "other.toml"'
        )
    # As it is called from here, where that is possible: messages name it so.
    return [*read_chain(file.parent / Path(base).expanduser(), (*above, where)), (file, values)]


def _check_version(values: dict[str, Any], file: Path) -> None:
    """Refuse a later version, and leave nothing of an older one in what a run has written."""
    version = values.get(VERSION_KEY)
    if isinstance(version, int) and not isinstance(version, bool) and version > CONFIG_VERSION:
        raise ConfigError(
            f"{VERSION_KEY} ({version}, {file}) must be <= {CONFIG_VERSION}, the newest that this "
            "release of agent-r1 reads; upgrade it"
        )
    if version == 1:
        del values[VERSION_KEY]
    if file.suffix == ".json" and version != CONFIG_VERSION:
        translate(values)
