"""Index of passages on Elasticsearch: name, analysis, mapping, and how to recognise one.

`agent-r1 search index` makes `NAME-<fingerprint>` with an alias NAME (`elasticsearch_build.py`);
the search tool reads it (`elasticsearch_bm25.py`). Every index carries its origin in `_meta`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import elasticsearch
from elasticsearch import Elasticsearch
from pydantic import ValidationError

from agent_r1.tools.search.corpus import hash_of
from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer, explained
from agent_r1_proto.messages import StrictMessage

ANALYZER = "agent_r1_english"
SIMILARITY = "agent_r1_bm25"
ANALYSIS: dict[str, Any] = {
    # Standard tokenizer, possessive 's, lower case, the 33 stop words of `_english_`, Porter.
    "analysis": {"analyzer": {ANALYZER: {"type": "english", "stopwords": "_english_"}}},
    "similarity": {SIMILARITY: {"type": "BM25", "k1": 1.2, "b": 0.75}},
}
MAPPING: dict[str, Any] = {
    "dynamic": "strict",
    # Title and text are kept as they came; what is searched is made of them and not kept again.
    "_source": {"excludes": ["contents"]},
    "properties": {
        "title": {"type": "text", "index": False},
        "text": {"type": "text", "index": False},
        "line": {"type": "long", "index": False, "doc_values": False},
        "contents": {
            "type": "text",
            "analyzer": ANALYZER,
            "similarity": SIMILARITY,
            "index_options": "freqs",
        },
    },
}
FORMAT = 1
SETTINGS_HASH = hash_of([FORMAT, ANALYSIS, MAPPING])

_META_KEY = "agent_r1"
_FINGERPRINT_CHARS = 16
_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,199}$")


class IndexMeta(StrictMessage):
    """`_meta.agent_r1` of an index: what it was made from, and how far."""

    fingerprint: str
    """Hash of the corpus contents and of the settings."""
    settings_hash: str
    corpus: str
    """File name of the corpus."""
    num_passages: int
    """Passages of the corpus."""
    loaded: int
    """Number of them, from the first, that are in the index."""
    complete: bool
    """All of them are, and the index may be searched."""


@dataclass(frozen=True)
class StoredIndex:
    """One index of the server."""

    name: str
    """Its own name, not that of an alias."""
    created_ms: int
    num_shards: int
    meta: IndexMeta | None
    """Facts of the index; None for one that is not ours."""
    differences: tuple[str, ...]
    """Differences of its analysis and mapping from ours."""


def fingerprint_of(corpus_sha256: str) -> str:
    """Return the fingerprint of an index: it changes with the corpus and with the settings."""
    return hash_of([corpus_sha256, SETTINGS_HASH])


def concrete_name(name: str, fingerprint: str) -> str:
    """Return the name of the index that holds one version of NAME."""
    return f"{name}-{fingerprint[:_FINGERPRINT_CHARS]}"


def is_version_of(name: str, concrete: str) -> bool:
    """Return whether an index is named as a version of NAME."""
    return (
        re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{{_FINGERPRINT_CHARS}}}", concrete) is not None
    )


def check_name(name: str) -> None:
    """Check the name of an index.

    Raises:
        ValueError: Elasticsearch would not take it.
    """
    if not _NAME.match(name):
        raise ValueError(
            f"index ({name!r}) must be 1 to 200 lower-case letters, digits, '.', '_' and '-', and "
            "begin with a letter or a digit; choose another name"
        )


def creation_body(meta: IndexMeta, num_shards: int) -> dict[str, Any]:
    """Return settings and mapping of a new index: no refresh and no replica while it is loaded."""
    return {
        "settings": {
            "number_of_shards": num_shards,
            "number_of_replicas": 0,
            "auto_expand_replicas": False,
            "refresh_interval": "-1",
            **ANALYSIS,
        },
        "mappings": {**MAPPING, **meta_mapping(meta)},
    }


def meta_mapping(meta: IndexMeta) -> dict[str, Any]:
    """Return the part of a mapping that holds `meta`."""
    return {"_meta": {_META_KEY: meta.model_dump()}}


def stored_indices(client: Elasticsearch, pattern: str) -> list[StoredIndex]:
    """Return the indices that a name, an alias or a pattern with `*` stands for; none is no error.

    Raises:
        ApiError: the server refuses.
    """
    try:
        answer = client.indices.get(index=pattern)
    except elasticsearch.NotFoundError:
        return []
    return [_stored(name, state) for name, state in answer.items()]


def check_index(client: Elasticsearch, server: ElasticsearchServer, name: str) -> StoredIndex:
    """Find the index behind a name or alias and check that it can be searched.

    Raises:
        ValueError: it cannot; the text says what to do.
    """
    with explained(server):
        found = stored_indices(client, name)
    command = (
        f"agent-r1 search index --backend elasticsearch --corpus FILE --index {shlex.quote(name)} "
        f"--url {shlex.quote(server.url)}"
    )
    if not found:
        raise ValueError(
            f"index {name!r} does not exist on {server.url}; make it with `{command}`, or correct "
            "the key index"
        )
    if len(found) > 1:
        names = ", ".join(sorted(index.name for index in found))
        raise ValueError(
            f"index {name!r} stands for several indices ({names}) on {server.url}; name one of them"
        )
    (index,) = found
    if index.differences:
        raise ValueError(
            f"index {name!r} ({index.name}) on {server.url} has another mapping: "
            f"{'; '.join(index.differences)}; make an index under another name with `{command}`"
        )
    if index.meta is None:
        raise ValueError(
            f"index {name!r} ({index.name}) on {server.url} was not made by this version of "
            f"`agent-r1 search index`; make one under another name with `{command}`"
        )
    if not index.meta.complete:
        raise ValueError(
            f"index {name!r} ({index.name}) on {server.url} holds {index.meta.loaded} of "
            f"{index.meta.num_passages} passages; finish it with `{command}`"
        )
    return index


def _stored(name: str, state: Mapping[str, Any]) -> StoredIndex:
    settings = state.get("settings", {}).get("index", {})
    mapping = state.get("mappings", {})
    try:
        meta = IndexMeta.model_validate(mapping.get("_meta", {}).get(_META_KEY))
    except ValidationError:
        meta = None
    differences = [
        *_differences(ANALYSIS, settings, "settings"),
        *_differences(MAPPING, mapping, "mapping"),
    ]
    return StoredIndex(
        name=name,
        created_ms=int(settings.get("creation_date", 0)),
        num_shards=int(settings.get("number_of_shards", 1)),
        meta=meta,
        differences=tuple(differences),
    )


def _differences(wanted: Any, actual: Any, where: str) -> Iterator[str]:
    """Yield where `actual` lacks something of `wanted`; the server writes every value as text."""
    if isinstance(wanted, dict):
        inner = actual if isinstance(actual, dict) else {}
        for key, value in wanted.items():
            yield from _differences(value, inner.get(key), f"{where}.{key}")
    elif _as_text(actual) != _as_text(wanted):
        is_now = "is missing" if actual is None else f"is {actual!r}"
        yield f"{where} {is_now} and must be {wanted!r}"


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
