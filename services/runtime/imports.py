"""Importing large packages, such as PyTorch and vLLM, in less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


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
