"""Pages of stored trajectories: the list, one of them, groups, and what evaluations changed.

Rows come from the index of the run (runs/index.py), which each page brings up to date for a short
time; app.py adds the routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from pydantic_core import to_json
from starlette.responses import Response

from agent_r1.console.pages import name_of, number, page, pager
from agent_r1.console.runs import Runs
from agent_r1.console.trajectory_filter import EVALUATION, STEPS, Filter
from agent_r1.console.trajectory_view import (
    LEGENDS,
    TEXT_BYTES,
    TOKENS,
    Colour,
    Texts,
    agents_of,
    filled,
    shades,
)
from agent_r1.runs.index import COMPONENT, SORTED, RunIndex
from agent_r1.runs.record import prompt_messages
from agent_r1.runs.run import Run
from agent_r1.runs.store import StoredTrajectory, stored_files
from agent_r1.runtime.imports import MissingPackageError
from agent_r1.runtime.unicode import repair_json

INDEX_S = 1.0
"""Time for which a page reads files into the index; the next page goes on."""
PAGE_ROWS = 50
"""Rows of a page: with the longest texts they stay below 200 kB."""
OPTIONS = 60
"""Most values that a choice offers; the names of tools are what models have written."""
COLUMNS = (
    *(("step", "Step"), ("set", "Set"), ("reward", "Reward"), ("components", "Components")),
    *(("advantage", "Advantage"), ("status", "Status"), ("num_tokens", "Tokens")),
    *(("num_turns", "Turns"), ("num_calls", "Calls"), ("last_version", "Version")),
    ("staleness", "Staleness"),
)
COLOURS: dict[Colour, str] = {
    "mask": "who wrote it",
    "logprob": "log-probability",
    "entropy": "entropy",
    "advantage": "advantage",
    "version": "policy version",
    "ratio": "ratio",
}
BESIDE = 16
"""Most trajectories side by side."""
KEPT_RUNS = 4
"""Runs whose tokenizers stay in memory."""
Start = Annotated[int, Query(ge=0, le=10**9)]
Row = Annotated[int, InPath(ge=0, le=10**9)]


def add_trajectories(app: FastAPI, runs: Runs) -> None:
    """Add the pages of trajectories."""
    pages, one = _Pages(runs), "/runs/{name}/trajectories/{file}/{row}"
    app.get("/runs/{name}/trajectories")(pages.trajectories)
    app.get("/runs/{name}/groups")(pages.groups)
    app.get("/runs/{name}/beside")(pages.beside)
    app.get("/runs/{name}/flipped")(pages.flipped)
    app.get(one)(pages.trajectory)
    app.get(f"{one}/json")(pages.as_json)


class _Pages:
    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[RunIndex, int]]:
        """Open the index of a run; yields it, and the number of files that it lacks."""
        with RunIndex(self._runs.folder(name)) as index:
            yield index, index.refresh(INDEX_S)

    def trajectories(self, request: Request, name: str, start: Start = 0) -> Response:
        chosen = Filter(request.query_params)
        with self._opened(name) as (index, left):
            rows = index.rows(chosen.query(PAGE_ROWS + 1, start))
            options = {
                column: [(one, one) for one in index.values(column) if len(one) <= 60][:OPTIONS]
                for column in ("set", "status", "tool", "component")
            }
            evaluations = index.values("evaluation")[:OPTIONS]
        return page(
            request,
            "trajectories.html",
            name=name,
            filter=chosen,
            rows=rows[:PAGE_ROWS],
            pager=pager(request, start, len(rows), PAGE_ROWS),
            left=left,
            files=len(stored_files(self._runs.folder(name))),
            columns=COLUMNS,
            sortable=SORTED,
            options=options.__getitem__,
            sources=[(STEPS, "steps"), *((EVALUATION + one, one) for one in evaluations)],
            sorts=[
                *((column, column.replace("_", " ")) for column in SORTED),
                *((COMPONENT + one, COMPONENT + one) for one, _ in options["component"]),
            ],
            links=[
                ("groups", "Groups"),
                ("flipped", "Flipped answers"),
                (f"beside{chosen.address()}", "Side by side"),
            ],
        )

    def groups(self, request: Request, name: str, start: Start = 0) -> Response:
        chosen = Filter(request.query_params)
        with self._opened(name) as (index, left):
            found = index.groups(chosen.steps(), limit=PAGE_ROWS + 1, offset=start)
        return page(
            request,
            "groups.html",
            name=name,
            filter=chosen,
            groups=found[:PAGE_ROWS],
            pager=pager(request, start, len(found), PAGE_ROWS),
            left=left,
        )

    def beside(self, request: Request, name: str) -> Response:
        chosen = Filter(request.query_params)
        with self._opened(name) as (index, _):
            rows = index.rows(chosen.query(BESIDE + 1, 0))
            shown = rows[:BESIDE]
            columns = [
                {
                    "row": row,
                    "turns": filled(index.read(row).record)["turns"],
                    "texts": Texts(TEXT_BYTES // len(shown)),
                }
                for row in shown
            ]
        return page(
            request,
            "beside.html",
            name=name,
            filter=chosen,
            columns=columns,
            more=len(rows) > BESIDE,
        )

    def flipped(
        self, request: Request, name: str, a: str = "", b: str = "", start: Start = 0
    ) -> Response:
        with self._opened(name) as (index, left):
            known = index.values("evaluation")
            before, after = _two_evaluations(known, name_of(a), name_of(b))
            pairs = index.flipped(before, after, limit=PAGE_ROWS + 1, offset=start)
        return page(
            request,
            "flipped.html",
            name=name,
            a=before,
            b=after,
            evaluations=known[-OPTIONS:],
            pairs=pairs[:PAGE_ROWS],
            pager=pager(request, start, len(pairs), PAGE_ROWS),
            left=left,
        )

    def trajectory(
        self,
        request: Request,
        name: str,
        file: str,
        row: Row,
        colour: Colour = "mask",
        token: Start = 0,
        turn: Start = 0,
    ) -> Response:
        run = _kept_run(self._runs.folder(name))
        stored = run.file(file).read(row)
        record, tokens = filled(stored.record), stored.tokens
        texts, found = None, None
        if tokens is not None:
            some = tokens.token_ids[token : token + TOKENS].tolist()
            texts = _token_texts(run, some)
            listed = texts or [f"{one} " for one in some]
            found = shades(tokens, listed, record["version_spans"], colour, token)
        return page(
            request,
            "trajectory.html",
            name=name,
            record=record,
            json=f"{request.url.path}/json",
            is_sample=run.file(file).evaluation is None,
            facts=_facts(record, run.file(file).evaluation),
            prompt=[(one.role, one.shown()) for one in prompt_messages(record)],
            first_turn=min(turn, max(0, len(record["turns"]) - 1)),
            texts=Texts(),
            tree=agents_of(record),
            shades=found,
            has_texts=texts is not None,
            colour=colour,
            colours=_colours(stored),
            legend=LEGENDS[colour],
            token=token,
            most_tokens=TOKENS,
            num_tokens=0 if tokens is None else len(tokens.token_ids),
        )

    def as_json(self, name: str, file: str, row: Row) -> Response:
        stored = Run(self._runs.folder(name)).file(file).read(row)
        arrays = None if stored.tokens is None else vars(stored.tokens)
        lists = arrays and {key: None if a is None else a.tolist() for key, a in arrays.items()}
        whole = {**stored.record, "tokens": lists}
        return Response(
            to_json(repair_json(whole), inf_nan_mode="null"), media_type="application/json"
        )


def _two_evaluations(known: list[str], a: str, b: str) -> tuple[str, str]:
    """Return the evaluations that are chosen; without a choice the first and the last one."""
    in_order = sorted(known, key=lambda one: (one != "before", one == "after", one))
    return a or (in_order or [""])[0], b or (in_order or [""])[-1]


@lru_cache(KEPT_RUNS)
def _kept_run(folder: Path) -> Run:
    """Return a run, whose tokenizer takes a while to read."""
    return Run(folder)


def _token_texts(run: Run, token_ids: list[int]) -> list[str] | None:
    try:
        return run.token_texts(token_ids)
    except MissingPackageError:  # the console runs without it, and shows ids
        return None


def _colours(stored: StoredTrajectory) -> list[tuple[Colour, str]]:
    """Return the colours for which a trajectory has numbers, and their titles."""
    tokens = stored.tokens
    missing = {
        "advantage": tokens is None or tokens.advantages is None,
        "entropy": tokens is None or tokens.entropies is None,
        "ratio": tokens is None or tokens.learner_logprobs is None,
    }
    return [(colour, title) for colour, title in COLOURS.items() if not missing.get(colour)]


def _facts(record: dict[str, Any], evaluation: str | None) -> list[tuple[str, Any]]:
    """Return what the head of the page lists, as (title, value)."""
    latency, versions = record.get("latency_ms"), record.get("policy_versions") or []
    return [
        ("evaluation" if evaluation else "step", evaluation or record["step"]),
        ("set", record["metadata"].get("set")),
        ("status", f"{record['status']}, {record['reason']}"),
        ("trained", "yes" if record.get("trained") else "no"),
        ("advantage", number(record.get("advantage"))),
        ("process reward", number(record.get("process_reward"))),
        ("versions", ", ".join(map(str, versions))),
        ("staleness", record.get("staleness")),
        ("tokens", record.get("num_tokens")),
        ("seconds", None if latency is None else round(latency / 1000, 3)),
        ("temperature", record.get("temperature")),
        ("seed", record.get("seed")),
        ("server", record.get("server_id")),
        ("id", record.get("rollout_id")),
    ]
