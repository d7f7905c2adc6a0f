"""`[tools.<name>]` of a search tool: what it searches, and what the model reads of it.

Read by tool.py. A search tool has keys of its own where other tools have `settings`, because the
checks before a start look for its corpus and its index.
"""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent_r1.tools.config import ToolConfig

TEMPLATE_FIELDS = ("number", "id", "title", "text", "score")

_BACKEND_KEYS = {
    "bm25": ("index_dir", "search_threads"),
    "elasticsearch": (
        *("elasticsearch_url", "index", "ca_certs", "verify_certs"),
        *("request_timeout_s", "gather_ms", "max_search_requests"),
    ),
}


class SearchConfig(ToolConfig):
    """Further keys of a tool of the type `search`."""

    backend: Literal["bm25", "elasticsearch"] = "bm25"
    """Backend that finds the passages; `bm25` is an index of this machine, `elasticsearch` one that
    `agent-r1 search index` has made on a server."""
    corpus: Path | None = None
    """JSON lines of {id, title, text}, plain or .gz; `bm25` needs it, `elasticsearch` does
    not read it."""
    index_dir: Path | None = None
    """bm25: folder of the index; None is `{corpus folder}/.index/{hash}`."""
    elasticsearch_url: str | None = None
    """elasticsearch: base URL of the server; credentials are variables, see
    docs/search.md."""
    index: str | None = None
    """elasticsearch: name of the index, as given to `agent-r1 search index`."""
    ca_certs: Path | None = None
    """elasticsearch: certificates (PEM) that vouch for the server; None is the system's."""
    verify_certs: bool = True
    """elasticsearch: False takes any certificate, for trials only."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """elasticsearch: longest one request may take before it is sent again, in seconds."""
    gather_ms: Annotated[float, Field(ge=0, le=1000)] = 2.0
    """elasticsearch: how long a query waits for others to share its request."""
    max_search_requests: Annotated[int, Field(ge=1)] = 4
    """elasticsearch: most requests at once."""
    description: str = "Searches an encyclopedia and returns the passages that match best."
    """Description of the tool for the model."""
    top_k: Annotated[int, Field(ge=1, le=1000)] = 5
    """Passages returned for a query."""
    passage_template: str = "[{number}] {title}\n{text}"
    """One passage; fields {number} (from 1), {id}, {title}, {text}, {score}."""
    separator: str = "\n\n"
    """Text between two passages."""
    empty_text: str = "No passage matches this query."
    """The answer when nothing matches."""
    max_chars: Annotated[int, Field(ge=16)] | None = None
    """Longer answers are cut to this many characters; None never cuts."""
    max_query_chars: Annotated[int, Field(ge=1)] = 1000
    """Most characters of a query; for a longer one the model gets an error."""
    max_search_batch: Annotated[int, Field(ge=1)] = 32
    """Most queries handed to the backend at once."""
    search_threads: Annotated[int, Field(ge=1)] = 1
    """bm25: threads that search."""
    cache_size: Annotated[int, Field(ge=0)] = 4096
    """Answers kept for repeated queries; 0 keeps none."""

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.url is not None:
            return self
        if self.settings:
            raise ValueError(
                f"settings ({sorted(self.settings)}) belong to tools of other types; "
                "the search tool has its own keys in this table"
            )
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
