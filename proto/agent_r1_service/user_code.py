"""Whether code that users bring can be called as a service calls it.

reward and learner ask when they load a function, so that a wrong signature is an error at start and
not in every call.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


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


def describe(exc: BaseException) -> str:
    """Return an exception of a user's code on one line: type, text, and where it was raised."""
    (*_, line) = traceback.format_exception_only(exc)
    frames = traceback.extract_tb(exc.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{' '.join(line.split())}{where}"
