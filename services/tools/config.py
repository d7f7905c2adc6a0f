"""`[tools.<name>]`: one tool, where it runs and how it is set up.

Read by `main.py` (a tool this run starts) and by rollout's launcher (its URL).
"""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from agent_r1_proto.config import ListenTable

BUILTIN_TOOLS = {
    "calculator": "agent_r1.tools.calculator:Calculator",
    "python_exec": "agent_r1.tools.python_exec:PythonExec",
    "code_tests": "agent_r1.tools.code_tests:CodeTests",
    "mcp": "agent_r1.tools.mcp_client:McpTool",
}
"""Tools that come with the system, by the name a table's `type` gives them; `search` is another."""
CLASS_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
TEMPLATE_FIELDS = ("number", "id", "title", "text", "score")

_COMMON_KEYS = {
    "type",
    "url",
    "host",
    "port",
    "advertise_host",
    "session_expiry_s",
    "drain_timeout_s",
    "max_calls_in_flight",
}


class ToolTable(ListenTable):
    """`[tools.<name>]`: the search tool, or a `Tool` subclass of the user's."""

    type: str = "search"
    """`search`, a name of BUILTIN_TOOLS, or `module:Name` of a `Tool` subclass found through
    `run.plugins`."""
    url: str | None = None
    """Base URL of a service that already runs; None starts one with this run."""
    session_expiry_s: Annotated[float, Field(gt=0)] = 600.0
    """A session without calls for this long is closed, in seconds."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 20.0
    """On shutdown, longest wait for calls in flight and open sessions, in seconds."""
    max_calls_in_flight: Annotated[int, Field(ge=1)] = 1024
    """More calls than this at once are answered 503."""
    settings: dict[str, JsonValue] = {}
    """Keyword arguments of the tool's class (every type but `search`)."""

    backend: Literal["bm25"] = "bm25"
    """Search: what finds the passages; `bm25` is an index of this machine."""
    corpus: Path | None = None
    """Search: JSON lines of {id, title, text}, plain or .gz; required unless `url` is set."""
    index_dir: Path | None = None
    """Search: folder of the index; None is `{corpus folder}/.index/{hash}`."""
    description: str = "Searches an encyclopedia and returns the passages that match best."
    """Search: what the model reads about the tool."""
    top_k: Annotated[int, Field(ge=1, le=1000)] = 5
    """Search: passages returned for a query."""
    passage_template: str = "[{number}] {title}\n{text}"
    """Search: one passage; fields {number} (from 1), {id}, {title}, {text}, {score}."""
    separator: str = "\n\n"
    """Search: text between two passages."""
    empty_text: str = "No passage matches this query."
    """Search: the answer when nothing matches."""
    max_chars: Annotated[int, Field(ge=16)] | None = None
    """Search: longer answers are cut to this many characters; None never cuts."""
    max_query_chars: Annotated[int, Field(ge=1)] = 1000
    """Search: a longer query is answered with an error the model reads, in characters."""
    max_search_batch: Annotated[int, Field(ge=1)] = 32
    """Search: most queries handed to the backend at once."""
    search_threads: Annotated[int, Field(ge=1)] = 1
    """Search: threads that search."""
    cache_size: Annotated[int, Field(ge=0)] = 4096
    """Search: answers kept for repeated queries; 0 keeps none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.url is not None:
            if not re.match(r"^https?://", self.url):
                raise ValueError(
                    f"url ({self.url!r}) must start with http:// or https://; leave it out to "
                    "start the tool with this run"
                )
            return self
        given = self.model_fields_set
        if self.type != "search":
            self._check_user_tool(given)
        elif self.corpus is None:
            raise ValueError(
                'type = "search" needs corpus: set it to a JSON lines file of {id, title, text}, '
                "or set url to a search service that already runs"
            )
        elif self.settings:
            raise ValueError(
                f"settings ({sorted(self.settings)}) belong to tools of other types; "
                "the search tool has its own keys in this table"
            )
        _check_template(self.passage_template)
        return self

    def _check_user_tool(self, given: set[str]) -> None:
        if self.type not in BUILTIN_TOOLS and not re.match(CLASS_PATTERN, self.type):
            raise ValueError(
                f"type ({self.type!r}) must be one of {', '.join(('search', *BUILTIN_TOOLS))}, or "
                '"module:Name" of a Tool subclass'
            )
        foreign = sorted(given - _COMMON_KEYS - {"settings"})
        if foreign:
            raise ValueError(
                f"{', '.join(foreign)}: keys of the search tool, but type is {self.type!r}; "
                "move them into settings, which reach the class as keyword arguments"
            )


def _check_template(template: str) -> None:
    known = ", ".join(f"{{{name}}}" for name in TEMPLATE_FIELDS)
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        template.format(number=1, id="", title="", text="", score=0.0)
    except (ValueError, KeyError, IndexError, AttributeError) as exc:
        raise ValueError(
            f"passage_template ({template!r}) does not format: {exc!r}; its fields are {known}"
        ) from exc
    if "text" not in names and "title" not in names:
        raise ValueError(
            f"passage_template ({template!r}) shows neither {{title}} nor {{text}}; "
            f"its fields are {known}"
        )
