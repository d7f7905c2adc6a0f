"""Errors of code that users bring, when it cannot be loaded or called.

Services ask when they load a function or class, so that a mistake is an error at start and not in
every call.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from agent_r1.runtime.files.file_formats import null_bytes, read_text

CODE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""Pattern by which a configuration names a class or function: `module:Name`."""
MOVED_MODULES = {
    "agent_r1.tools.code_tests": "agent_r1.tools.sandbox.code_tests",
    "agent_r1.tools.mcp_client": "agent_r1.tools.mcp.client",
    "agent_r1.tools.python_exec": "agent_r1.tools.sandbox.python_exec",
    "agent_r1.tools.search": "agent_r1.tools.search.tool",
    "agent_r1.rollout.envs.tool_env": "agent_r1.rollout.envs.base",
    **{
        f"agent_r1.rollout.tool_formats{module}": f"agent_r1.text.tool_formats{module}"
        for module in ("", ".base", ".code_block", ".hermes", ".llama3_json", ".mistral", ".react")
    },
}
"""Modules of built-in classes that configurations and users' code may name as they were called.

What a run of an older version has written is translated (config/versions.py); elsewhere an old name
is refused with the new one.
"""
_OURS = {"agent_r1", "agent_r1_deploy", "agent_r1_proto", "__main__"}
"""Packages whose lines are not the user's; a service is the main module of its process."""
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def check_call(function: Callable[..., Any], *arguments: str, name: str) -> None:
    """Check that a function takes these arguments, by position.

    Args:
        function: what will be called.
        arguments: names of the arguments it will be called with.
        name: what the message calls the function.

    Raises:
        ValueError: it does not; the text says what it must take.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C, it does not say what it takes
    try:
        signature.bind(*arguments)
    except TypeError as exc:
        raise ValueError(
            f"{name}{signature} is called as {name}({', '.join(arguments)}): {exc}; "
            "give it these parameters"
        ) from exc


def check_methods(kind: type, owner: str, methods: Mapping[str, Sequence[str]]) -> None:
    """Check that methods of a class are async and take the arguments they will be given.

    Args:
        kind: the class.
        owner: what the message calls it.
        methods: names of the arguments after `self`, by the method's name.

    Raises:
        ValueError: one is not; the text says what to write.
    """
    for name, arguments in methods.items():
        function = getattr(kind, name)
        if not inspect.iscoroutinefunction(function):
            raise ValueError(
                f"{owner}: {name} is not async; write `async def {name}` and move blocking work "
                "into asyncio.to_thread"
            )
        signature = inspect.signature(function)
        try:
            signature.bind(None, *arguments)
        except TypeError as exc:
            raise ValueError(
                f"{owner}: {name}{signature} cannot be called: {exc}; write "
                f"`async def {name}({', '.join(('self', *arguments))})`"
            ) from exc


def new_code_name(name: str) -> str:
    """Return what a `module:Name` of an older version is called now; anything else as it is."""
    module, colon, attribute = name.partition(":")
    return f"{MOVED_MODULES.get(module, module)}:{attribute}" if colon else name


def import_named(name: str, label: str) -> Any:
    """Import what a configuration names as `module:Name`.

    Args:
        name: the value of the key.
        label: what the message calls it: key and value.

    Raises:
        ValueError: the module cannot be imported, or has nothing of this name.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:
        raise ValueError(
            f"{label}: module {module_name} cannot be imported: {_why_not(module_name, exc)}"
        ) from exc
    if not hasattr(module, attribute):
        if moved := _moved(module_name):
            raise ValueError(f"{label}: {moved}")
        public = [found for found in vars(module) if not found.startswith("_")]
        nearest = difflib.get_close_matches(attribute, public, n=1)
        hint = f'; did you mean "{nearest[0]}"?' if nearest else "; check its name"
        raise ValueError(f"{label}: module {module_name} has no {attribute}{hint}")
    return getattr(module, attribute)


def _why_not(module: str, exc: Exception) -> str:
    """Say why a module cannot be imported: it is not there, or what it imports is not."""
    missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
    if isinstance(exc, ImportError) and (moved := _moved(exc.name)):
        return f"{exc}; {moved}"
    if missing is None:
        return _unreadable(module, exc) or describe(exc)
    if f"{module}.".startswith(f"{missing}."):
        return f"{exc}; check the name, and that its folder is in run.plugins"
    package, _, inner = missing.partition(".")
    if inner and package in sys.modules:
        return f"{describe(exc)}; the installed {package} has no {missing}: check name and version"
    return (
        f"{describe(exc)}; it imports {missing}, which is not installed here: install its package "
        f"(`{sys.executable} -m pip install {package}`, where that is its name), or add its folder "
        "to run.plugins"
    )


def _unreadable(module: str, exc: Exception) -> str | None:
    """Say which file is no UTF-8 text, as which Python reads code."""
    if "null byte" not in str(exc) and "codec can't decode" not in str(exc):
        return None
    named = exc.filename if isinstance(exc, SyntaxError) else None
    for file in [Path(named)] if named else _files_beside(module):
        with contextlib.suppress(OSError):
            if problem := _text_problem(file):
                return f"SyntaxError: {file}: {problem}"  # older Pythons: ValueError
    return None


def _text_problem(file: Path) -> str | None:
    try:
        read_text(file)
    except ValueError as exc:
        return str(exc)
    return null_bytes(file.read_bytes())


def _files_beside(module: str) -> Iterator[Path]:
    """Yield the code of a module's package, or beside it: what it may have imported."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(folder).rglob("*.py"))
    if spec is not None and spec.origin:
        yield from sorted(Path(spec.origin).parent.glob("*.py"))


def _moved(module: str | None) -> str | None:
    return f"{module} is now {MOVED_MODULES[module]}" if module in MOVED_MODULES else None


def kind_of(value: object) -> str:
    """Say what a user's code returned, where it should have returned something else."""
    return "None" if value is None else f"{type(value).__name__} ({short_repr(value)})"


def short_repr(value: object) -> str:
    """Return how Python writes a value of a user's code, cut, whatever it is."""
    try:
        return f"{value!r:.80}"
    except Exception:  # noqa: BLE001 - too deep, too many digits, or an object of the user's
        return f"a value of type {type(value).__name__} that cannot be written"


def describe(exc: BaseException) -> str:
    """Return an exception of a user's code on one line: type, text, and the line at fault."""
    (*_, line) = traceback.format_exception_only(exc)
    return f"{' '.join(line.split())}{_where(exc)}"


def _where(exc: BaseException) -> str:
    """Return file and line: of what does not parse, or of the last line of the user's that ran."""
    if isinstance(exc, SyntaxError) and Path(exc.filename or "").is_file():
        return _place(exc.filename, exc.lineno)
    return _last_of_users(traceback.walk_tb(exc.__traceback__))


def line_of_stack(frame: FrameType) -> str:
    """Return file and line, in brackets, of the user's line that a thread is at."""
    return _last_of_users(reversed(list(traceback.walk_stack(frame))))


def _last_of_users(calls: Iterable[tuple[FrameType, int]]) -> str:
    frames = [frame for frame in calls if _is_of_a_file(frame)]
    own = [frame for frame in frames if _is_users(frame)]
    if not frames:
        return ""
    frame, number = (own or frames)[-1]
    return _place(frame.f_code.co_filename, number)


def _is_of_a_file(frame: tuple[FrameType, int]) -> bool:
    return not frame[0].f_code.co_filename.startswith("<")  # <frozen importlib._bootstrap>


def _is_users(frame: tuple[FrameType, int]) -> bool:
    module: str = frame[0].f_globals.get("__name__", "")
    file = frame[0].f_code.co_filename
    return module.partition(".")[0] not in _OURS and not file.startswith(_LIBRARIES)


def _place(file: str | None, line: int | None) -> str:
    return f" ({Path(file or '').name}, line {line})"
