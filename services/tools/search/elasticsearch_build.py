"""Loads a corpus into Elasticsearch: one index per version, an alias that names the newest.

Reads a corpus file, writes `NAME-<fingerprint>` in bulk requests of a set size, notes in the
index's `_meta` how far it is, and switches the alias NAME when all of it is there. A load that was
stopped, for whatever reason, continues where it was: passages are created under their own id, so
sending one twice changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import elastic_transport
import elasticsearch
from elasticsearch import Elasticsearch, helpers

from agent_r1.runtime.files.writing import hash_file
from agent_r1.tools.search.corpus import Passage, read_passages, searched_text, survey
from agent_r1.tools.search.elasticsearch_client import (
    ElasticsearchServer,
    check_server,
    explain,
    explained,
    reason_in,
    reason_of,
)
from agent_r1.tools.search.elasticsearch_index import (
    ANALYZER,
    SETTINGS_HASH,
    IndexMeta,
    StoredIndex,
    check_name,
    concrete_name,
    creation_body,
    fingerprint_of,
    is_version_of,
    meta_mapping,
    stored_indices,
)

MAX_ID_BYTES = 512
"""Elasticsearch's limit of an `_id`."""
CHUNK_PASSAGES = 2000
"""Most passages in one bulk request, whatever their size."""
BULK_RETRIES = 8
CONFLICT, TOO_LARGE, TOO_MANY = 409, 413, 429
NOTE_PROGRESS_EVERY_S = 5.0
HEALTH_TIMEOUT = "60s"
# What the analyzer must make of it: possessive and stop word gone, the rest stemmed.
_PROBE = ("The king's running dogs", ["king", "run", "dog"])

Report = Callable[[str, int, int | None], None]
"""(what is being done, passages done, passages in all)."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of a load."""

    bulk_bytes: int = 8 << 20
    """Size of a bulk request, in bytes."""
    num_shards: int = 1
    replicas: int | None = None
    """Copies of the finished index; None is one where the cluster has a second node."""
    delete_old: bool = False
    """Delete every other version; False keeps the one that was searched before."""


@dataclass(frozen=True)
class BuildResult:
    """Result of a load."""

    index: str
    """The version that NAME now stands for."""
    num_passages: int
    resumed_at: int | None
    """Passages that were there already; None when nothing had to be loaded."""
    switched: bool
    """NAME stood for another version, or none, before."""
    deleted: tuple[str, ...]
    unfinished: tuple[str, ...]
    """Versions that an earlier load has left incomplete."""


def build_index(
    server: ElasticsearchServer,
    corpus: Path,
    name: str,
    options: BuildOptions = BuildOptions(),
    report: Report = lambda *_: None,
) -> BuildResult:
    """Load a corpus as the index NAME; a corpus that is there already is not loaded again.

    Raises:
        ValueError: the corpus, the server or an index of that name is wrong, or the server stopped
            answering; the text says what to do.
    """
    check_name(name)
    with server.client(max_retries=BULK_RETRIES, retry_on_timeout=True) as client:
        check_server(client, server)
        with explained(server):
            return _build(client, server, corpus, name, options, report)


def _build(
    client: Elasticsearch,
    server: ElasticsearchServer,
    corpus: Path,
    name: str,
    options: BuildOptions,
    report: Report,
) -> BuildResult:
    if not corpus.is_file():
        next(read_passages(corpus))  # raises the corpus error
    before = _aliased(client, server, name)
    report("reading the corpus", 0, None)
    fingerprint = fingerprint_of(hash_file(corpus))
    concrete = concrete_name(name, fingerprint)
    meta = _meta_of(client, server, concrete)
    if meta is None:
        meta = IndexMeta(
            fingerprint=fingerprint,
            settings_hash=SETTINGS_HASH,
            corpus=corpus.name,
            # Before anything is made of it: every line, and that no id comes twice.
            num_passages=survey(
                corpus,
                lambda count: report("checking the corpus", count, None),
                partial(_check_id, corpus),
            ),
            loaded=0,
            complete=False,
        )
        _create(client, concrete, meta, options)
    resumed_at = None if meta.complete else meta.loaded
    if not meta.complete:
        _check_analyzer(client, concrete)
        Loader(client, server, corpus, concrete, meta, options.bulk_bytes, report).load()
        meta = _finish(client, concrete, meta, options)
    switched = concrete not in {index.name for index in before}
    if switched:
        _switch(client, name, concrete, before)
    deleted, unfinished = _tidy(client, name, concrete, before, options)
    return BuildResult(concrete, meta.num_passages, resumed_at, switched, deleted, unfinished)


def _aliased(client: Elasticsearch, server: ElasticsearchServer, name: str) -> list[StoredIndex]:
    """Return the versions that NAME is an alias of."""
    found = stored_indices(client, name)
    for index in found:
        if index.name == name:
            raise ValueError(
                f"{name!r} is an index of {server.url} and must be free for an alias; choose "
                "another --index"
            )
        if not is_version_of(name, index.name):
            raise ValueError(
                f"{name!r} is an alias of {index.name!r} on {server.url}, which was not made by "
                "this command; choose another --index"
            )
    return found


def _meta_of(client: Elasticsearch, server: ElasticsearchServer, concrete: str) -> IndexMeta | None:
    """Return what is noted in the version to load; None when there is none yet."""
    found = stored_indices(client, concrete)
    if not found:
        return None
    meta = found[0].meta
    if meta is None or found[0].differences:
        problem = "; ".join(found[0].differences) or "it does not say what it was made from"
        raise ValueError(
            f"index {concrete!r} on {server.url} was not made by this command: {problem}; "
            "delete it and run the command again, or choose another --index"
        )
    return meta


def _check_id(corpus: Path, line: int, passage: Passage) -> None:
    size = len(passage.id.encode())
    if not 1 <= size <= MAX_ID_BYTES:
        raise ValueError(
            f"{corpus}:{line}: id ({passage.id[:40]!r}) has {size} bytes and must have 1 to "
            f"{MAX_ID_BYTES}; give the passage another id"
        )


def _create(client: Elasticsearch, concrete: str, meta: IndexMeta, options: BuildOptions) -> None:
    body = creation_body(meta, options.num_shards)
    try:
        client.indices.create(index=concrete, settings=body["settings"], mappings=body["mappings"])
    except elasticsearch.BadRequestError as exc:
        reason = reason_of(exc)
        if "resource_already_exists" in reason:
            return  # another process loads the same version; both may
        if "analy" in reason or "filter" in reason:
            raise ValueError(
                f"the server lacks the analyzer `english` ({reason}); use a complete distribution "
                "of Elasticsearch 8, which has the module analysis-common"
            ) from exc
        raise ValueError(f"index {concrete!r} cannot be created: {reason}") from exc


def _check_analyzer(client: Elasticsearch, concrete: str) -> None:
    text, wanted = _PROBE
    answer = client.indices.analyze(index=concrete, analyzer=ANALYZER, text=text)
    tokens = [token["token"] for token in answer["tokens"]]
    if tokens != wanted:
        raise ValueError(
            f"the server's analyzer `english` turns {text!r} into {tokens} and must turn it into "
            f"{wanted}; use a complete distribution of Elasticsearch 8"
        )


@dataclass
class Loader:
    """Sends the passages of one corpus that are not in the index yet."""

    client: Elasticsearch
    server: ElasticsearchServer
    corpus: Path
    concrete: str
    meta: IndexMeta
    bulk_bytes: int
    report: Report

    def load(self) -> None:
        """Send everything; on the way out, note how far it got."""
        answered = self.meta.loaded
        noted = time.monotonic()
        self.report("loading", answered, self.meta.num_passages)
        try:
            for ok, info in helpers.streaming_bulk(
                self.client,
                self._actions(),
                chunk_size=CHUNK_PASSAGES,
                max_chunk_bytes=self.bulk_bytes,
                raise_on_error=False,
                max_retries=BULK_RETRIES,
                initial_backoff=0.5,
                max_backoff=30.0,
            ):
                self._check(ok, info["create"])
                answered += 1
                now = time.monotonic()
                if now - noted >= NOTE_PROGRESS_EVERY_S:
                    noted = now
                    self._note(answered)
                    self.report("loading", answered, self.meta.num_passages)
        except (elasticsearch.ApiError, elastic_transport.TransportError) as exc:
            if isinstance(exc, elasticsearch.ApiError) and exc.status_code == TOO_LARGE:
                raise ValueError(
                    f"the server refuses requests of {self.bulk_bytes} bytes (413); lower "
                    "--bulk-mb and run the command again to continue"
                ) from exc
            raise ValueError(
                f"loading stopped after {answered} of {self.meta.num_passages} passages: "
                f"{explain(exc, self.server)}; then run the same command again to continue"
            ) from exc
        except KeyboardInterrupt:
            self._note(answered)
            raise
        self.report("loading", answered, self.meta.num_passages)

    def _actions(self) -> Iterator[dict[str, Any]]:
        passages = read_passages(self.corpus, skip=self.meta.loaded)
        for line, passage in enumerate(passages, start=self.meta.loaded + 1):
            yield _action(self.concrete, passage, line)

    def _check(self, ok: bool, item: Mapping[str, Any]) -> None:
        if ok or item["status"] == CONFLICT:  # an earlier load has sent it
            return
        reason = reason_in(item.get("error", "no reason given"))
        if item["status"] == TOO_MANY:
            raise ValueError(
                f"the server is overloaded ({reason}); run the same command again later to "
                "continue, or lower --bulk-mb"
            )
        raise ValueError(f"{self.corpus}: the server refuses the passage {item['_id']!r}: {reason}")

    def _note(self, answered: int) -> None:
        # Items of the last request may be answered out of order, when some were sent again.
        loaded = max(self.meta.loaded, answered - CHUNK_PASSAGES)
        _note_meta(self.client, self.concrete, self.meta.model_copy(update={"loaded": loaded}))


def _action(concrete: str, passage: Passage, line: int) -> dict[str, Any]:
    return {
        "_op_type": "create",
        "_index": concrete,
        "_id": passage.id,
        "title": passage.title,
        "text": passage.text,
        "line": line,
        "contents": searched_text(passage),
    }


def _note_meta(client: Elasticsearch, concrete: str, meta: IndexMeta) -> None:
    client.indices.put_mapping(index=concrete, meta=meta_mapping(meta)["_meta"])


def _finish(
    client: Elasticsearch, concrete: str, meta: IndexMeta, options: BuildOptions
) -> IndexMeta:
    client.indices.refresh(index=concrete)
    count = client.count(index=concrete)["count"]
    if count != meta.num_passages:
        raise ValueError(
            f"index {concrete!r} has {count} passages after loading and the corpus has "
            f"{meta.num_passages}; something else has changed that index: delete it and run the "
            "command again"
        )
    copies: dict[str, Any] = (
        {"auto_expand_replicas": "0-1"}
        if options.replicas is None
        else {"number_of_replicas": options.replicas}
    )
    client.indices.put_settings(index=concrete, settings={"refresh_interval": None, **copies})
    client.cluster.health(index=concrete, wait_for_status="yellow", timeout=HEALTH_TIMEOUT)
    done = meta.model_copy(update={"loaded": count, "complete": True})
    _note_meta(client, concrete, done)
    return done


def _switch(client: Elasticsearch, name: str, concrete: str, before: list[StoredIndex]) -> None:
    """Let NAME stand for the new version, in one step: there is no moment without it."""
    client.indices.update_aliases(
        actions=[
            {"add": {"index": concrete, "alias": name}},
            *({"remove": {"index": index.name, "alias": name}} for index in before),
        ]
    )


def _tidy(
    client: Elasticsearch,
    name: str,
    concrete: str,
    before: list[StoredIndex],
    options: BuildOptions,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Delete old versions.

    Returns:
        The versions deleted, and the incomplete ones that were left.
    """
    replaced = {index.name for index in before}
    others = [
        index
        for index in stored_indices(client, f"{name}-*")
        if is_version_of(name, index.name) and index.meta is not None and index.name != concrete
    ]
    # The version searched until now comes first, then the newest.
    others.sort(key=lambda index: (index.name in replaced, index.created_ms), reverse=True)
    complete = [index.name for index in others if index.meta is not None and index.meta.complete]
    unfinished = [index.name for index in others if index.name not in complete]
    doomed = complete[1:]
    if options.delete_old:
        doomed, unfinished = [index.name for index in others], []
    for index_name in doomed:
        client.indices.delete(index=index_name)
    return tuple(doomed), tuple(unfinished)
