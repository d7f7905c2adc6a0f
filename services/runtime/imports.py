"""Imports of large packages in less time, and of those that only some users have installed."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quick_imports() -> Generator[None]:
    """Collect no garbage inside, and let no later collection look at what was imported inside.

    Modules live as long as the process. Looking at them again and again takes a third of the CPU
    time of an import of vLLM, and then a second of each full collection.
    """
    collects, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:  # else there is nothing to keep but garbage
            gc.freeze()
        if collects:
            gc.enable()


class MissingPackageError(ValueError):
    """A package of an extra is not installed; the text has the command that installs it."""


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Import a module of a package that an extra of this project installs.

    Args:
        module: to import, such as `pyarrow.parquet`.
        extra: of `agent-r1` that has its package.
        needed_by: what the message says needs it: key and value.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        package = module.partition(".")[0]
        if (exc.name or "").partition(".")[0] != package:
            raise  # it is installed, and broken
        raise MissingPackageError(
            f"{needed_by} needs the package {package}, which is not installed; "
            f"`pip install 'agent-r1[{extra}]'`"
        ) from exc
