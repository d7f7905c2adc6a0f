"""Packages that only some users need: imported when they are used, named when they are missing."""

from __future__ import annotations

import importlib
from typing import Any


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
