"""Names of policies: every task, weight version and lineage belongs to one.

This release trains one policy, "policy". Its name is left out wherever a message is written, and
any other name is refused.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

DEFAULT_POLICY = "policy"


def _check(name: str) -> str:
    if name != DEFAULT_POLICY:
        raise ValueError(
            f"the policy ({name!r}) is not known: this release has one, {DEFAULT_POLICY!r}; leave "
            "the name out"
        )
    return name


def _is_default(name: str) -> bool:
    return name == DEFAULT_POLICY


PolicyName = Annotated[str, AfterValidator(_check), Field(exclude_if=_is_default)]
