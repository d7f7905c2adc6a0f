"""Kinds of tools: run.toml's `type` --> the class that checks the table."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from agent_r1.tools.config import SEARCH, ToolConfig
from agent_r1.tools.search.config import SearchConfig

KIND = "kind of tool: "
"""Beginning of the name of a class where pydantic says which it took; no key has a space."""


def _kind(table: Any) -> str:
    of = table.get("type", SEARCH) if isinstance(table, dict) else getattr(table, "type", None)
    return f"{KIND}search" if of == SEARCH else f"{KIND}other"


AnyToolConfig = Annotated[
    # The first has every key that a tool can have, which sources.py checks names against.
    Annotated[SearchConfig, Tag(f"{KIND}search")] | Annotated[ToolConfig, Tag(f"{KIND}other")],
    Discriminator(_kind),
]
"""The table of any tool."""
