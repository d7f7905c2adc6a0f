"""Sources of configuration values: files, `AGENT_R1__` variables, `--set`; in this order.

The `config.json` of a run folder may be of an older version: its keys are translated here.

`run.py` calls `collect` with the composed table class and gets one nested dict to validate, and
for every key where its value came from. Each source names its keys as the tables do; an unknown
key is an error that names the nearest known one. Paths are resolved against the source they were
written in, so that a configuration file can be used from any folder.

pydantic-settings (2.16) could read the variables and merge the sources, about 50 of these lines. It
passes over a variable of a misspelt table, adds a second tool where the case of a name differs,
and knows neither the source of a value nor the folder a path is relative to: these need the walk
over the tables below in any case.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from agent_r1.config.versions import CONFIG_VERSION, Key, check_version, new_name, put, translate
from agent_r1.runtime.config import FOLDER_OR_NAME
from agent_r1.runtime.files.file_formats import read_text
from agent_r1.runtime.files.task_source import HUB_PREFIX
from agent_r1.tools.kinds import KIND

EXTENDS = "extends"
VERSION_KEY = "config_version"
ENV_PREFIX = "AGENT_R1__"
NAME_PATTERN = r"[A-Za-z_](?:[A-Za-z0-9-]|_(?!_)){0,63}"
"""Names of tools. Without two underscores in a row, which separate the parts of a variable."""
REDACTED = "***"
"""Stands in `config.json` for a secret; the service gets the value from the environment."""

_SECRET_NAME = re.compile(r"(^|_)(password|secret|api_key|token)$")
OTHER_NAMES = "docs/names-elsewhere.md"

LONGEST_LIST = 16
"""Known names are all listed in a message up to so many."""


class ConfigError(ValueError):
    """A configuration that cannot be used; says value, limit and remedy."""


@dataclass(frozen=True)
class Setting:
    """One value from one source."""

    key: Key
    value: Any
    source: str
    """Place where it was written, in words."""
    base: Path
    """Folder that relative paths are resolved against."""


def dotted(key: Sequence[str]) -> str:
    """Render a key as users write it: `tools.search.top_k`."""
    return ".".join(key)


def variable_of(key: Sequence[str]) -> str:
    """Return the environment variable that sets a key: `AGENT_R1__TOOLS__SEARCH__TOP_K`."""
    return ENV_PREFIX + "__".join(key).upper()


def flat_leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by dotted key, whether keys were written dotted or as tables."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat_leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def at_hand(path: Path) -> Path:
    """Return a path as it is called from the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def quoted(path: Path) -> str:
    """Return a path as it is called from the current folder, to be pasted into a shell."""
    return shlex.quote(str(at_hand(path)))


# --- The shape of the tables -------------------------------------------------------------------


def _members(annotation: Any) -> list[Any]:
    """Return the alternatives of a type, through Annotated and unions."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def _table(annotation: Any) -> type[BaseModel] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _entry_table(annotation: Any) -> type[BaseModel] | None:
    """Return T of a type `dict[str, T]` whose values are tables (`tools`)."""
    for member in _members(annotation):
        if get_origin(member) is dict:
            return _table(get_args(member)[1])
    return None


def _annotation_below(
    annotation: Any, name: str, *, tables: type[BaseModel], key: Key, source: str
) -> Any:
    """Return the type of what has a name in a value at `key`; None where anything may be there.

    Raises:
        ConfigError: the value has no such key, or the name is none that users may give.
    """
    table, entry = _table(annotation), _entry_table(annotation)
    if table is not None:
        if name not in table.model_fields:
            raise ConfigError(_unknown(tables, key, name, source, list(table.model_fields)))
        return table.model_fields[name].rebuild_annotation()
    named_freely = entry is None or hasattr(entry, "SHORT_FORM")
    if not named_freely and not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"[{dotted((*key, name))}] ({source}) is not a usable name; use a letter or _ "
            "first, then up to 63 letters, digits, _ and -, never __"
        )
    return entry


def field_annotation(tables: type[BaseModel], key: Key, source: str = "") -> Any:
    """Return the type of the field at `key`; None when the key leads into a free-form field.

    Raises:
        ConfigError: the key is unknown.
    """
    annotation: Any = tables
    for i, name in enumerate(key):
        annotation = _annotation_below(annotation, name, tables=tables, key=key[:i], source=source)
    return annotation


def known_keys(annotation: Any, prefix: Key = ()) -> Iterator[Key]:
    """Yield every key of the tables, the name of a `tools.<name>` table as `<name>`."""
    table, entry = _table(annotation), _entry_table(annotation)
    if table is not None:
        for name, field in table.model_fields.items():
            yield from known_keys(field.annotation, (*prefix, name))
    elif entry is not None:
        yield from known_keys(entry, (*prefix, "<name>"))
    else:
        yield prefix


def _unknown(
    tables: type[BaseModel],
    prefix: Key,
    name: str,
    source: str,
    known: list[str],
) -> str:
    """Say that a name is no key of a table, and which known one it was or is the nearest to."""
    key = (*prefix, name)
    if (renamed := new_name(key)) is not None:
        return f"{dotted(key)} ({source}) is called {dotted(renamed)} now"
    where = f" in table [{dotted(prefix)}]" if prefix else ""
    message = f"unknown {'key' if prefix else 'table'} {name!r}{where} ({source})"
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
    elsewhere = [dotted(key) for key in known_keys(tables) if key[-1:] == (name.lower(),)]
    if elsewhere and not near:
        return f"{message}; did you mean {' or '.join(elsewhere)}?"
    there = "" if near else f"; {OTHER_NAMES} has those of TRL, verl and OpenRLHF"
    near = near or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
    nearest = f"the nearest known one is {near[0]!r}" if near else "it has no keys"
    every = f" (known: {', '.join(known)})" if len(known) <= LONGEST_LIST else ""
    return f"{message}; {nearest}{every}{there}"


def leaves(
    tables: type[BaseModel], values: Any, source: str, key: Key = ()
) -> Iterator[tuple[Key, Any]]:
    """Yield every value of nested tables with its key, checking each key on the way.

    Args:
        tables: what the keys are checked against.
        values: the value at `key`: of all tables, without a key.
        source: where it was written, for messages.
        key: where it is in the tables.

    Raises:
        ConfigError: a key is unknown, or a table holds something else than keys.
    """
    yield from _leaves(field_annotation(tables, key, source), values, source, key, tables)


def _leaves(
    annotation: Any, values: Any, source: str, key: Key, tables: type[BaseModel]
) -> Iterator[tuple[Key, Any]]:
    table = _table(annotation)
    short_form = getattr(table, "SHORT_FORM", None)
    free = table is None and _entry_table(annotation) is None
    if short_form is not None and isinstance(values, str):
        yield (*key, short_form), values
    elif key and (free or values is None or values == {}):
        yield key, values
    elif not isinstance(values, Mapping):
        raise ConfigError(
            f"{dotted(key)} ({values!r}, {source}) must be a table; write "
            f"[{dotted(key)}] and its keys below it"
        )
    else:
        for name, value in values.items():
            below = _annotation_below(annotation, name, tables=tables, key=key, source=source)
            yield from _leaves(below, value, source, (*key, name), tables)


# --- The sources -------------------------------------------------------------------------------


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
    version = values.pop(VERSION_KEY, None)
    if version is not None:
        _require_readable(version, f"file {file}")
    if file.suffix == ".json" and version != CONFIG_VERSION:
        translate(values)


def _require_readable(version: object, source: str) -> None:
    try:
        check_version(version, source)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc


def parse_text(text: str, annotation: Any) -> Any:
    """Turn the text of a variable or of `--set` into a value.

    The text is a TOML value (`3`, `0.5`, `true`, `["a", "b"]`, `{a = 1}`); `none` where the field
    may be empty; anything else, and anything for a text field, is taken as it stands.
    """
    members = [] if annotation is None else _members(annotation)
    accepts_none = annotation is None or type(None) in members
    if accepts_none and text.strip().lower() in ("none", "null"):
        return None
    wants_text = any(m in (str, Path) or get_origin(m) is typing.Literal for m in members)
    if wants_text and not re.match(r"""^\s*["']""", text):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _resolve_name(names: Mapping[str, Any], wanted: str) -> str:
    """Find the name a variable means: variables are upper case, names need not be."""
    if wanted in names:
        return wanted
    folded = {name.lower().replace("-", "_"): name for name in names}
    return folded.get(wanted.lower().replace("-", "_"), wanted.lower())


def _walk_variable(tables: type[BaseModel], variable: str, so_far: Mapping[str, Any]) -> Key:
    """Turn `AGENT_R1__TOOLS__SEARCH__TOP_K` into a key."""
    key: Key = ()
    annotation: Any = tables
    level: Any = so_far
    for part in variable.removeprefix(ENV_PREFIX).split("__"):
        # Below a field of free names: a tool, or a key of a dict such as `env.options`.
        names = level if _table(annotation) is None and isinstance(level, Mapping) else {}
        name = _resolve_name(names, part)
        annotation = _annotation_below(
            annotation, name, tables=tables, key=key, source=f"variable {variable}"
        )
        key = (*key, name)
        level = level.get(name) if isinstance(level, Mapping) else None
    return key


def variable_settings(
    tables: type[BaseModel], environ: Mapping[str, str], so_far: Mapping[str, Any]
) -> Iterator[Setting]:
    """Yield the settings of the environment.

    Raises:
        ConfigError: a variable with our prefix names no key.
    """
    for variable in sorted(environ):
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        key = _walk_variable(tables, variable.upper(), so_far)
        yield from _text_settings(tables, key, environ[variable], f"variable {variable}")


def option_settings(tables: type[BaseModel], options: Sequence[str]) -> Iterator[Setting]:
    """Yield the settings of `--set KEY=VALUE` options.

    Raises:
        ConfigError: an option is no `KEY=VALUE` or names no key.
    """
    for option in options:
        name, equals, text = option.partition("=")
        key = tuple(part.strip() for part in name.split("."))
        if not equals or not all(key):
            raise ConfigError(
                f"--set {option!r} is not KEY=VALUE; write for example --set learner.steps=10"
            )
        if re.match(r"[^\s@]*://[^\s/@]*:[^\s]*@", text.strip(" \"'")):
            raise ConfigError(
                f"--set {dotted(key)} holds a password, which every user of this machine can read "
                f"in the list of processes; set the variable {variable_of(key)} instead"
            )
        yield from _text_settings(tables, key, text.strip(), f"--set {dotted(key)}")


def _text_settings(tables: type[BaseModel], key: Key, text: str, source: str) -> Iterator[Setting]:
    value = parse_text(text, field_annotation(tables, key, source))
    for leaf, leaf_value in leaves(tables, value, source, key):
        yield Setting(leaf, leaf_value, source, Path.cwd())


# --- Putting them together ---------------------------------------------------------------------


def located(value: Any, annotation: Any, base: Path) -> Any:
    """Resolve the paths in a value against a folder; its type says where they are."""
    if isinstance(value, str) and FOLDER_OR_NAME in getattr(annotation, "__metadata__", ()):
        path = base / Path(value).expanduser()
        return str(path.resolve()) if path.is_dir() or value.startswith((".", "~", "/")) else value
    for member in _members(annotation):
        inner, kind = get_args(member), get_origin(member)
        if isinstance(value, str) and member is Path and not value.startswith(HUB_PREFIX):
            return str((base / Path(value).expanduser()).resolve())
        if isinstance(value, list) and kind is list:
            return [located(item, inner[0], base) for item in value]
        if isinstance(value, dict) and kind is dict:
            return {name: located(item, inner[1], base) for name, item in value.items()}
        if isinstance(member, type) and issubclass(member, BaseModel):
            return _located_table(value, member, base)
    return value


def _located_table(value: Any, table: type[BaseModel], base: Path) -> Any:
    short_form = getattr(table, "SHORT_FORM", None)
    if isinstance(value, str) and short_form is not None:
        return located(value, table.model_fields[short_form].annotation, base)
    if not isinstance(value, dict):
        return value
    fields = table.model_fields
    return {
        name: located(item, fields[name].annotation, base) if name in fields else item
        for name, item in value.items()
    }


def collect(
    tables: type[BaseModel],
    *,
    file: Path | None,
    environ: Mapping[str, str],
    options: Sequence[str],
    outputs: frozenset[Key],
    given: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[Key, str]]:
    """Read all sources, later ones over earlier ones.

    `given` are tables from Python, which come after the file. Paths of `outputs` are resolved
    against the current folder, every other path against the folder of the file that names it.

    Returns:
        The nested values to validate, and for every key set where its value came from.

    Raises:
        ConfigError: a source is unreadable or names an unknown key.
    """
    tree: dict[str, Any] = {}
    origins: dict[Key, str] = {}

    def apply(setting: Setting) -> None:
        if setting.key == (VERSION_KEY,):
            _require_readable(setting.value, setting.source)
            return
        base = Path.cwd() if setting.key in outputs else setting.base
        value = located(setting.value, field_annotation(tables, setting.key), base)
        put(tree, setting.key, value)
        origins[setting.key] = setting.source

    for path, values in read_chain(file) if file is not None else ():
        for key, value in leaves(tables, values, str(path)):
            apply(Setting(key, value, f"file {path}", path.resolve().parent))
    for key, value in leaves(tables, given or {}, "given"):
        apply(Setting(key, value, "given from Python", Path.cwd()))
    for setting in variable_settings(tables, environ, tree):
        apply(setting)
    for setting in option_settings(tables, options):
        apply(setting)
    return tree, origins


def is_secret(key: Key) -> bool:
    """Return whether what a key holds is shown to nobody, by the key's name."""
    return bool(key) and _SECRET_NAME.search(key[-1].lower()) is not None


def explain(error: ValidationError, origins: Mapping[Key, str]) -> str:
    """Render pydantic's complaints, one a line: key, value, what is wrong, where it was set."""
    lines = []
    for item in error.errors(include_url=False):
        key = tuple(str(part) for part in item["loc"] if not str(part).startswith(KIND))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            lines.append(f"{dotted(key)} is required and not set; set it in the file")
            continue
        where = next(
            (source for size in range(len(key), 0, -1) if (source := origins.get(key[:size]))), ""
        )
        value = item.get("input")
        hidden = isinstance(value, dict) or item["type"] == "value_error" or is_secret(key)
        shown = "" if hidden else f" ({value!r})"
        suffix = f" [{where}]" if where else ""
        named = not key or message.startswith(f"{dotted(key)}.")
        lines.append(f"{message}{suffix}" if named else f"{dotted(key)}{shown}: {message}{suffix}")
    return "\n".join(lines)
