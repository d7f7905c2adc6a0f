"""Embedded BM25 search: a tantivy index on disk, built once per corpus.

Reads a corpus file, writes `index_dir` (a tantivy index and `index.json`, which says what it was
built from), and answers queries of the search tool. A build goes to a folder beside it, under a
lock, and is renamed into place: processes that start together build once and none reads half. A
build that was stopped continues at its last commit.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.metadata
import logging
import re
import shutil
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tantivy
from pydantic import ValidationError

from agent_r1.runtime.files.writing import hash_file, put_in_place
from agent_r1.tools.search.backend import Found, Hit
from agent_r1.tools.search.corpus import (
    ENGLISH_STOP_WORDS,
    Passage,
    hash_of,
    read_passages,
    searched_text,
    survey,
)
from agent_r1.tools.search.unspaced import cut_unspaced
from agent_r1_proto.messages import StrictMessage

logger = logging.getLogger(__name__)

SETTINGS: dict[str, Any] = {
    "format": 1,
    "tantivy": importlib.metadata.version("tantivy"),
    "analyzer": (
        "no possessive 's, pieces of unspaced scripts, simple, lowercase, stop words, "
        "english stemmer"
    ),
    "stop_words": list(ENGLISH_STOP_WORDS),
    "indexed": "title, newline, text in NFKC",
}

# What Lucene's `english` analyzer takes off the end of a word.
_POSSESSIVE = re.compile(r"(?<=\w)['\u2019\uff07][sS](?!\w)")
_FIELD = "contents"
_STORED = "passage"
_ANALYZER = "english_stop_stem"
_META_FILE = "index.json"
_BUILD_FILE = "build.json"
_WRITER_HEAP_BYTES = 128_000_000
_PROGRESS_EVERY_S = 5.0
_COMMIT_EVERY_S = 60.0
"""A build that is stopped loses at most so much, in seconds."""


class IndexMeta(StrictMessage):
    """`index.json`: what an index was built from."""

    settings_hash: str
    corpus_sha256: str
    corpus_bytes: int
    corpus_mtime_ns: int
    num_passages: int


def open_index(corpus: Path, index_dir: Path | None = None) -> TantivyIndex:
    """Open the index of a corpus; build it first when it is missing or the corpus has changed.

    Args:
        corpus: JSON lines of {id, title, text}, plain or .gz.
        index_dir: folder of the index; None is `{corpus folder}/.index/{hash}`.

    Raises:
        ValueError: the corpus is missing or malformed, or the folder cannot be written.
    """
    if not corpus.is_file():
        next(read_passages(corpus))  # raises the corpus error
    settings_hash = hash_of(SETTINGS)
    if index_dir is None:
        name = hash_of([corpus.name, settings_hash])[:16]
        index_dir = corpus.resolve().parent / ".index" / name
    try:
        # First without the lock: a finished index may lie on a read-only disk.
        meta = _usable_meta(corpus, index_dir, settings_hash)
        if meta is not None:
            return TantivyIndex(index_dir, meta)
        index_dir.parent.mkdir(parents=True, exist_ok=True)
        with _locked(index_dir.with_name(f"{index_dir.name}.lock")):
            meta = _usable_meta(corpus, index_dir, settings_hash)
            if meta is None:
                meta = _build(corpus, index_dir, settings_hash)
            return TantivyIndex(index_dir, meta)
    except OSError as exc:
        raise ValueError(
            f"index folder {str(index_dir)!r} of corpus {str(corpus)!r} cannot be used: {exc}; "
            "set index_dir to a folder that can be written and has room"
        ) from exc


def is_current(corpus: Path, index_dir: Path) -> bool:
    """Return whether a folder holds the finished index of a corpus as it is now."""
    return corpus.is_file() and _usable_meta(corpus, index_dir, hash_of(SETTINGS)) is not None


class TantivyIndex:
    """A BM25 index opened for searching (k1 = 1.2, b = 0.75).

    A query is an OR of its analyzed words: any text is allowed, nothing in it is syntax.
    """

    def __init__(self, index_dir: Path, meta: IndexMeta) -> None:
        self._meta = meta
        self._schema = _schema()
        self._analyzer = _analyzer()
        index = tantivy.Index.open(str(index_dir))
        index.register_tokenizer(_ANALYZER, self._analyzer)
        self._searcher = index.searcher()

    @property
    def fingerprint(self) -> str:
        """Hash of the corpus contents and of the analysis settings."""
        return hash_of([self._meta.corpus_sha256, self._meta.settings_hash])

    @property
    def num_passages(self) -> int:
        """Number of passages indexed."""
        return self._meta.num_passages

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Find at most `top_k` passages per query, best first."""
        return [self._search_one(query, top_k) for query in queries]

    def _search_one(self, text: str, top_k: int) -> list[Hit]:
        counts = Counter(self._analyzer.analyze(_words_of(text)))
        if not counts:
            return []
        clauses = []
        for term, count in counts.items():
            query = tantivy.Query.term_query(self._schema, _FIELD, term, index_option="freq")
            if count > 1:
                query = tantivy.Query.boost_query(query, float(count))
            clauses.append((tantivy.Occur.Should, query))
        found = self._searcher.search(
            tantivy.Query.boolean_query(clauses), limit=top_k, count=False
        ).hits
        return [Hit(self._passage(address), float(score)) for score, address in found]

    def _passage(self, address: tantivy.DocAddress) -> Passage:
        stored = self._searcher.doc(address).get_first(_STORED)
        assert stored is not None  # every document was written with one
        return Passage.model_validate_json(bytes(stored))


class ThreadedBackend:
    """Searches an index in threads of its own, which leave the event loop free."""

    def __init__(self, index: TantivyIndex, threads: int = 1) -> None:
        self._index = index
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="search")

    @property
    def fingerprint(self) -> str:
        """The index's."""
        return self._index.fingerprint

    async def start(self) -> None:
        """Do nothing: threads start with the searches that need them."""

    async def search(
        self, queries: Sequence[str], top_k: int, time_left_s: Callable[[], float]
    ) -> list[Found | Exception]:
        """Search in a thread; a search that has begun is not interrupted."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, self._index.search, queries, top_k)
        return [Found(hits) for hits in found]

    async def close(self) -> None:
        """Wait for the searches that run."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)


def _words_of(text: str) -> str:
    """Return a text as the analyzer is to read it.

    In NFKC, letters of half and full width and other variants of a letter are that letter.
    """
    return cut_unspaced(_POSSESSIVE.sub("", unicodedata.normalize("NFKC", text)))


def _analyzer() -> tantivy.TextAnalyzer:
    return (
        tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
        .filter(tantivy.Filter.lowercase())
        .filter(tantivy.Filter.custom_stopword(list(ENGLISH_STOP_WORDS)))
        .filter(tantivy.Filter.stemmer("english"))
        .build()
    )


def _schema() -> tantivy.Schema:
    return (
        tantivy.SchemaBuilder()
        .add_text_field(_FIELD, stored=False, tokenizer_name=_ANALYZER, index_option="freq")
        # The passage as JSON bytes: a stored text field would be indexed a second time.
        .add_bytes_field(_STORED, stored=True, indexed=False)
        .build()
    )


def _build(corpus: Path, index_dir: Path, settings_hash: str) -> IndexMeta:
    started = time.monotonic()
    logger.info("index build started corpus=%s index_dir=%s", corpus, index_dir)
    stat = corpus.stat()
    num_passages = survey(corpus, _every_few_seconds("reading the corpus: %d passages"))
    meta = IndexMeta(
        settings_hash=settings_hash,
        corpus_sha256=hash_file(corpus),
        corpus_bytes=stat.st_size,
        corpus_mtime_ns=stat.st_mtime_ns,
        num_passages=num_passages,
    )
    unfinished = index_dir.with_name(f"{index_dir.name}.building")
    index = _open_unfinished(unfinished, meta)
    written = _write_passages(corpus, index, meta.num_passages)
    if written != meta.num_passages:
        shutil.rmtree(unfinished)
        raise ValueError(
            f"corpus {str(corpus)!r} had {meta.num_passages} passages when its index was begun and "
            f"{written} at the end; do not change it during a build, and run the command again"
        )
    (unfinished / _META_FILE).write_text(meta.model_dump_json(indent=1))
    (unfinished / _BUILD_FILE).unlink()
    put_in_place(unfinished, index_dir)
    logger.info(
        "index build finished corpus=%s num_passages=%d seconds=%.1f",
        corpus,
        meta.num_passages,
        time.monotonic() - started,
    )
    return meta


def _open_unfinished(folder: Path, meta: IndexMeta) -> tantivy.Index:
    """Open what a stopped build of the same index has left, or begin a new one."""
    note = folder / _BUILD_FILE
    with suppress(FileNotFoundError, NotADirectoryError, ValidationError, ValueError):
        left = IndexMeta.model_validate_json(note.read_text())
        if left.model_copy(update={"corpus_mtime_ns": meta.corpus_mtime_ns}) == meta:
            return _for_writing(tantivy.Index.open(str(folder)))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    index = tantivy.Index(_schema(), path=str(folder))
    note.write_text(meta.model_dump_json(indent=1))  # last: without it the folder is of no use
    return _for_writing(index)


def _for_writing(index: tantivy.Index) -> tantivy.Index:
    index.register_tokenizer(_ANALYZER, _analyzer())
    return index


def _write_passages(corpus: Path, index: tantivy.Index, num_passages: int) -> int:
    done = index.searcher().num_docs  # a commit holds a beginning of the corpus, nothing else
    if done:
        logger.info("index build continues num_passages=%d of=%d", done, num_passages)
    # One indexing thread: documents keep the corpus's order, so ties rank the same in every build
    # that needed one commit.
    writer = index.writer(heap_size=_WRITER_HEAP_BYTES, num_threads=1)
    report = _every_few_seconds(f"building the index: %d of {num_passages} passages")
    committed = time.monotonic()
    try:
        for passage in read_passages(corpus, skip=done):
            document = tantivy.Document()
            document.add_text(_FIELD, _words_of(searched_text(passage)))
            document.add_bytes(_STORED, passage.model_dump_json().encode())
            writer.add_document(document)
            done += 1
            report(done)
            if time.monotonic() - committed >= _COMMIT_EVERY_S:
                writer.commit()
                committed = time.monotonic()
        writer.commit()
    finally:
        writer.wait_merging_threads()
    return done


def _every_few_seconds(text: str) -> Callable[[int], None]:
    """Return a function that logs a count, and how many there are a second, now and then."""
    said = started = time.monotonic()
    first: int | None = None

    def report(count: int) -> None:
        nonlocal said, first
        first = count if first is None else first
        now = time.monotonic()
        if now - said >= _PROGRESS_EVERY_S:
            said = now
            logger.info(f"{text}, %.0f passages/s", count, (count - first) / (now - started))

    return report


def _usable_meta(corpus: Path, index_dir: Path, settings_hash: str) -> IndexMeta | None:
    """Return the index's description when it fits the corpus and the settings, else None."""
    try:
        meta = IndexMeta.model_validate_json((index_dir / _META_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as exc:
        logger.warning("index description unreadable index_dir=%s error=%s", index_dir, exc)
        return None
    stat = corpus.stat()
    if meta.settings_hash != settings_hash:
        logger.info("index has other settings, building again index_dir=%s", index_dir)
        return None
    if (meta.corpus_bytes, meta.corpus_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        return meta
    if meta.corpus_bytes == stat.st_size and meta.corpus_sha256 == hash_file(corpus):
        return meta
    logger.info("corpus has changed, building its index again corpus=%s", corpus)
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds the index lock=%s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
