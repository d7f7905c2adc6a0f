"""Packages that are installed, and those that a command needs beyond `pip install agent-r1`.

checks.py and cli/task/validate.py ask before they load anything, so that a person who has not run
`agent-r1 setup` reads that, and not which import failed first.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable

LEARNER = ("deepspeed", "torch", "transformers")
TOOLS = ("mcp", "transformers")
"""Packages of tools and reward, and for prompts in tokens."""
PEFT = "peft"
"""Package of the learner, where it trains adapters."""
FLASH_ATTENTION = ("flash_attn", "kernels")
"""Either is enough for transformers: the package, or what fetches a build of it from the hub."""
WHOLE_RUN = (*LEARNER, "mcp", "vllm")


def missing_packages_problem(modules: Iterable[str]) -> str | None:
    """Say which of these modules are not installed, and how to install them; None if all are."""
    missing = sorted(name for name in modules if importlib.util.find_spec(name) is None)
    if not missing:
        return None
    return (
        f"{', '.join(missing)}: not installed in this environment; run `agent-r1 setup cpu`, or "
        "`agent-r1 setup gpu` on a machine with NVIDIA GPUs (in a clone: `make setup` or "
        "`make setup-gpu`)"
    )


def flash_attention_problem(attention: str) -> str | None:
    """Say what `model.attention` lacks; None if nothing.

    No lock has it: PyPI has its source alone, whose build needs nvcc of torch's CUDA.
    """
    there = any(importlib.util.find_spec(name) is not None for name in FLASH_ATTENTION)
    if attention != "flash_attention_2" or there:
        return None
    return (
        'model.attention ("flash_attention_2") needs the package flash-attn, which is not '
        'installed, and of which PyPI has the source alone; set model.attention = "sdpa", or, with '
        "nvcc of CUDA 13, `pip install --no-build-isolation flash-attn`"
    )


def installed_version(package: str) -> str:
    """Return the version of an installed package; "" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
