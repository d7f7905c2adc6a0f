"""`agent-r1 search index`: makes the index that the search tool searches.

Reads a corpus file; writes a folder (embedded) or an index of an Elasticsearch server. Prints how
far it is, and at the end what it did.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from agent_r1.cli.declare import integer, number

SAY_EVERY_S = 5.0
STOPPED = "stopped; run the same command again to continue"


def index_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `search index`."""
    add = parser.add_argument
    add(
        "--backend",
        choices=("elasticsearch", "embedded"),
        required=True,
        help="elasticsearch: an index on a server; embedded: a folder on this machine",
    )
    corpus_help = "JSON lines of {id, title, text}"
    add("--corpus", type=Path, required=True, metavar="FILE", help=corpus_help)
    add("--index", required=True, metavar="NAME", help="name of the index; embedded: its folder")
    add("--url", metavar="URL", help="the server (default: http://localhost:9200)")
    add("--ca-certs", type=Path, metavar="FILE", help="PEM file to verify the server with")
    add("--no-verify-certs", action="store_true", help="accept any certificate")
    add(
        "--bulk-mb",
        type=integer(1, 1024),
        default=8,
        metavar="N",
        help="size of a request in MiB (default: 8)",
    )
    add(
        "--shards",
        type=integer(1, 1024),
        default=1,
        metavar="N",
        help="parts of the index (default: 1)",
    )
    replicas_help = "copies of the index (default: 1 if the cluster has a second node)"
    add("--replicas", type=integer(0, 1024), metavar="N", help=replicas_help)
    add(
        "--delete-old",
        action="store_true",
        help="delete every other version; by default the previous one is kept",
    )
    add(
        "--request-timeout-s",
        type=number(1),
        default=120.0,
        metavar="S",
        help="longest one request may take, in seconds (default: 120)",
    )


def index(arguments: argparse.Namespace) -> int:
    """Build the index of a corpus.

    Running the command again does nothing; after an interruption it continues. A corpus that has
    changed becomes a new version, which replaces the old one when it is complete. Credentials for
    Elasticsearch come from the environment: set AGENT_R1_ELASTICSEARCH_API_KEY, or
    AGENT_R1_ELASTICSEARCH_USER and AGENT_R1_ELASTICSEARCH_PASSWORD; with _FILE at its end, a
    variable names a file instead.
    """
    if arguments.backend == "embedded":
        return _index_embedded(arguments)
    return _index_elasticsearch(arguments)


def _index_embedded(arguments: argparse.Namespace) -> int:
    from agent_r1.tools.search.tantivy_bm25 import is_current, open_index

    corpus: Path = arguments.corpus
    folder = Path(arguments.index)
    _refuse_foreign(arguments)
    if is_current(corpus, folder):
        built = open_index(corpus, folder)
        print(f"{folder}: already the index of {corpus} ({built.num_passages:,} passages)")
        return 0
    # The builder logs how far it is.
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("agent_r1.tools.search").setLevel(logging.INFO)
    started = time.monotonic()
    try:
        built = open_index(corpus, folder)
    except KeyboardInterrupt:
        print(STOPPED)
        raise
    print(
        f"{folder}: {built.num_passages:,} passages in {time.monotonic() - started:.1f} s; serve "
        f'it with backend = "bm25", corpus = "{corpus}", index_dir = "{folder}"'
    )
    return 0


def _refuse_foreign(arguments: argparse.Namespace) -> None:
    for option in ("url", "ca_certs", "replicas"):
        if getattr(arguments, option) is not None:
            raise ValueError(
                f"--{option.replace('_', '-')} belongs to --backend elasticsearch; leave it out"
            )


def _index_elasticsearch(arguments: argparse.Namespace) -> int:
    from agent_r1.tools.search.elasticsearch_build import BuildOptions, BuildResult, build_index
    from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer

    server = ElasticsearchServer.from_environment(
        os.environ,
        url=arguments.url or "http://localhost:9200",
        ca_certs=arguments.ca_certs,
        verify_certs=not arguments.no_verify_certs,
        request_timeout_s=arguments.request_timeout_s,
    )
    options = BuildOptions(
        bulk_bytes=arguments.bulk_mb << 20,
        num_shards=arguments.shards,
        replicas=arguments.replicas,
        delete_old=arguments.delete_old,
    )
    name: str = arguments.index
    started = time.monotonic()
    try:
        result: BuildResult = build_index(
            # Printed at once, into a log file too.
            server,
            arguments.corpus,
            name,
            options,
            progress_lines(partial(print, flush=True)),
        )
    except KeyboardInterrupt:
        print(STOPPED)
        raise
    for deleted in result.deleted:
        print(f"deleted the old version {deleted}")
    for unfinished in result.unfinished:
        print(f"{unfinished} was never finished; --delete-old deletes it and every old version")
    if result.resumed_at is None and not result.switched:
        current = f"{result.index} ({result.num_passages:,} passages)"
        print(f"{name}: nothing to do; it already is {current}")
        return 0
    there = result.num_passages if result.resumed_at is None else result.resumed_at
    loaded = result.num_passages - there
    print(
        f"{name} is now {result.index}: {result.num_passages:,} passages, {loaded:,} of them "
        f"loaded in {time.monotonic() - started:.1f} s"
    )
    return 0


def progress_lines(
    say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int | None], None]:
    """Return a report function that prints a line for every stage, and one every few seconds."""
    stage = ""
    began = said = 0.0
    first = 0

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal stage, began, said, first
        now = clock()
        if what != stage:
            stage, began, said, first = what, now, now, done
            say(what if total is None else f"{what}: {done:,} of {total:,} passages")
            return
        if now - said < SAY_EVERY_S and done != total:
            return
        said = now
        parts = [f"{what}: {done:,}" + (" passages" if total is None else f" of {total:,}")]
        rate = (done - first) / (now - began) if now > began else 0.0
        if rate > 0:
            parts.append(f"{rate:,.0f} passages/s")
            if total is not None and done < total:
                parts.append(f"{(total - done) / rate / 60:.1f} min left")
        say(", ".join(parts))

    return report
