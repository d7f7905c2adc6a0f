"""`[tools.<name>]`: one tool, where it runs and how it is set up.

Read by `main.py` (a tool this run starts) and by rollout's launcher (its URL).
"""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from agent_r1_service.config import ListenConfig

BUILTIN_TOOLS = {
    "calculator": "agent_r1.tools.calculator:Calculator",
    "python_exec": "agent_r1.tools.sandbox.python_exec:PythonExec",
    "code_tests": "agent_r1.tools.sandbox.code_tests:CodeTests",
    "mcp": "agent_r1.tools.mcp.client:McpTool",
}
"""Tools that come with the system, by the name a table's `type` gives them; `search` is another."""
MAX_RESULT_BYTES = 128 << 10
CLASS_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
TEMPLATE_FIELDS = ("number", "id", "title", "text", "score")

_COMMON_KEYS = {
    *ListenConfig.model_fields,
    *("type", "url", "settings", "session_expiry_s", "drain_timeout_s", "max_calls_in_flight"),
    *("announce_expiry_s", "max_result_bytes", "new_version"),
}
_BACKEND_KEYS = {
    "bm25": ("index_dir", "search_threads"),
    "elasticsearch": (
        *("elasticsearch_url", "index", "ca_certs", "verify_certs"),
        *("request_timeout_s", "gather_ms", "max_search_requests"),
    ),
}


class ToolConfig(ListenConfig):
    """`[tools.<name>]`: the search tool, or the user's own `Tool` subclass."""

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
    """More calls than this at once are answered 503; also the capacity that is announced."""
    announce_expiry_s: Annotated[float, Field(ge=1)] = 5.0
    """An announcement in the tool pool that is not renewed for this long disappears, in seconds."""
    max_result_bytes: Annotated[int, Field(ge=256)] = MAX_RESULT_BYTES
    """Longer text of one result is cut before it travels, in bytes of UTF-8."""
    new_version: Literal["all", "none"] | Annotated[float, Field(gt=0, lt=1)] = "all"
    """Share of new trajectories a version gets when it is first announced beside another: `all`,
    `none`, or a share such as 0.1. Weights that are set already decide instead."""
    settings: dict[str, JsonValue] = {}
    """Keyword arguments of the tool's class (every type but `search`)."""

    backend: Literal["bm25", "elasticsearch"] = "bm25"
    """Search: what finds the passages; `bm25` is an index of this machine, `elasticsearch` one that
    `agent-r1 search index` has made on a server."""
    corpus: Path | None = None
    """Search: JSON lines of {id, title, text}, plain or .gz; `bm25` needs it, `elasticsearch` does
    not read it."""
    index_dir: Path | None = None
    """Search, bm25: folder of the index; None is `{corpus folder}/.index/{hash}`."""
    elasticsearch_url: str | None = None
    """Search, elasticsearch: base URL of the server; credentials are variables, see
    docs/search.md."""
    index: str | None = None
    """Search, elasticsearch: name of the index, as given to `agent-r1 search index`."""
    ca_certs: Path | None = None
    """Search, elasticsearch: certificates (PEM) that vouch for the server; None is the system's."""
    verify_certs: bool = True
    """Search, elasticsearch: False takes any certificate, for trials only."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Search, elasticsearch: longest one request may take before it is sent again, in seconds."""
    gather_ms: Annotated[float, Field(ge=0, le=1000)] = 2.0
    """Search, elasticsearch: how long a query waits for others to share its request."""
    max_search_requests: Annotated[int, Field(ge=1)] = 4
    """Search, elasticsearch: most requests at once."""
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
    """Search, bm25: threads that search."""
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
        if self.type != "search":
            self._check_user_tool()
        elif self.settings:
            raise ValueError(
                f"settings ({sorted(self.settings)}) belong to tools of other types; "
                "the search tool has its own keys in this table"
            )
        else:
            self._check_backend()
        _check_template(self.passage_template)
        return self

    def _check_backend(self) -> None:
        fields = type(self).model_fields
        # By value: a resolved table names every key.
        foreign = sorted(
            key
            for backend, keys in _BACKEND_KEYS.items()
            if backend != self.backend
            for key in keys
            if getattr(self, key) != fields[key].default
        )
        if foreign:
            raise ValueError(
                f"{', '.join(foreign)}: not a key of backend {self.backend!r}, whose own are "
                f"{', '.join(_BACKEND_KEYS[self.backend])}; remove it or choose another backend"
            )
        if self.backend == "bm25" and self.corpus is None:
            raise ValueError(
                'type = "search" needs corpus: set it to a JSON lines file of {id, title, text}, '
                "or set url to a search service that already runs"
            )
        if self.backend == "elasticsearch":
            _check_elasticsearch(self.elasticsearch_url, self.index)

    def _check_user_tool(self) -> None:
        if self.type not in BUILTIN_TOOLS and not re.match(CLASS_PATTERN, self.type):
            raise ValueError(
                f"type ({self.type!r}) must be one of {', '.join(('search', *BUILTIN_TOOLS))}, or "
                '"module:Name" of a Tool subclass'
            )
        foreign = sorted(self.model_fields_set - _COMMON_KEYS)
        if foreign:
            raise ValueError(
                f"{', '.join(foreign)}: keys of the search tool, but type is {self.type!r}; "
                "move them into settings, which are passed to the class as keyword arguments"
            )


def _check_elasticsearch(url: str | None, index: str | None) -> None:
    if url is None or index is None:
        missing = "elasticsearch_url" if url is None else "index"
        raise ValueError(
            f'backend = "elasticsearch" needs {missing}: set elasticsearch_url to the base URL of '
            "the server, and index to the name given to `agent-r1 search index`"
        )
    check_elasticsearch_url(url)


def check_elasticsearch_url(url: str) -> None:
    """Check the base URL of an Elasticsearch server.

    Raises:
        ValueError: it has no scheme, or holds a user name.
    """
    if not re.match(r"^https?://[^/]", url):
        raise ValueError(
            f"elasticsearch_url ({url!r}) must start with http:// or https://, such as "
            "http://localhost:9200"
        )
    if "@" in url:
        raise ValueError(
            "elasticsearch_url holds a user name or password; take them out of the URL and set the "
            "variables AGENT_R1_ELASTICSEARCH_USER and AGENT_R1_ELASTICSEARCH_PASSWORD"
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
