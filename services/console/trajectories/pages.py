"""Pages of stored trajectories: the list, one of them, groups, and what evaluations changed.

Rows come from the index of the run (runs/index.py), which each page brings up to date for a short
time; app.py adds the routes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from pydantic_core import to_json
from starlette.responses import Response

from agent_r1.console.pages import name_of, number, page, pager
from agent_r1.console.runs import DAMAGE, Runs
from agent_r1.console.trajectories.filter import EVALUATION, STEPS, Filter
from agent_r1.console.trajectories.view import (
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
from agent_r1.runs.store import StoredFile, StoredTrajectory, stored_files
from agent_r1.runtime.imports import MissingPackageError
from agent_r1.runtime.unicode import repair_json

INDEX_S = 1.0
"""Time for which a page reads files into the index; the next page goes on."""
PAGE_ROWS = 50
"""Rows of a page: with the longest texts they stay below 200 kB."""
OPTIONS = 60
"""Most values that a choice offers; the names of tools are what models have written."""
LONGEST_OPTION = 60
"""Most characters of such a value."""
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
REASON_BYTES = TEXT_BYTES // 3
"""Bytes of what reward components say on a page."""
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

    def _list(
        self,
        request: Request,
        template: str,
        name: str,
        files: Sequence[StoredFile],
        start: int,
        is_first: Callable[[StoredFile], bool],
        ask: Callable[[RunIndex], Sequence[Any]],
        **values: Any,
    ) -> Response:
        """Return a page of rows, after the index has read on for a while.

        Args:
            request: of the page.
            template: extends list.html.
            name: of the run.
            files: stored by the run.
            start: first row.
            is_first: tells the files that the page asks for, which are read before others.
            ask: returns the rows, one more than a page has where there are more.
            values: of the template.
        """
        with RunIndex(self._runs.folder(name)) as index:
            values["left"] = index.refresh(INDEX_S, is_first)
            rows, values["damaged"] = ask(index), index.damaged()
        turn = pager(request, start, len(rows), PAGE_ROWS)
        values |= {"rows": rows[:PAGE_ROWS], "files": len(files), "start": start}
        return page(request, template, name=name, pager=turn, **values)

    def _files(self, name: str) -> list[StoredFile]:
        return stored_files(self._runs.folder(name))

    def trajectories(self, request: Request, name: str, start: Start = 0) -> Response:
        chosen, files = Filter(request.query_params), self._files(name)
        sources = [(EVALUATION + one, one) for one in _evaluations(files)]
        options = {"of": [(STEPS, "steps"), *sources]}
        options["sort"] = [(column, column.replace("_", " ")) for column in SORTED]

        def ask(index: RunIndex) -> list[dict[str, Any]]:
            for column in ("set", "status", "tool", "component"):
                short = [one for one in index.values(column) if len(one) <= LONGEST_OPTION]
                options[column] = [(one, one) for one in short[:OPTIONS]]
            options["sort"] += [
                (COMPONENT + one, COMPONENT + one) for one, _ in options["component"]
            ]
            return index.rows(chosen.query(PAGE_ROWS + 1, start))

        links = [
            ("", "The run"),
            *_links_of_steps(chosen.chosen["step"], chosen.chosen["step_to"]),
            *(("/groups", "Groups"), ("/flipped", "Flipped answers")),
            (f"/beside{chosen.address()}", "Side by side"),
        ]
        more = {"columns": COLUMNS, "sortable": SORTED, "options": options, "links": links}
        return self._list(
            *(request, "trajectories.html", name, files, start, chosen.wants, ask),
            filter=chosen,
            **more,
        )

    def groups(self, request: Request, name: str, start: Start = 0) -> Response:
        chosen, files = Filter(request.query_params), self._files(name)

        def ask(index: RunIndex) -> list[dict[str, Any]]:
            return index.groups(chosen.steps(), limit=PAGE_ROWS + 1, offset=start)

        return self._list(
            request, "groups.html", name, files, start, chosen.wants, ask, filter=chosen
        )

    def beside(self, request: Request, name: str) -> Response:
        chosen, files = Filter(request.query_params), self._files(name)

        def ask(index: RunIndex) -> list[dict[str, Any]]:
            rows = index.rows(chosen.query(BESIDE, 0))
            room = TEXT_BYTES // max(1, len(rows))
            turns = [filled(index.read(row).record)["turns"] for row in rows]
            return [
                {"row": row, "turns": of_it, "texts": Texts(room)}
                for row, of_it in zip(rows, turns, strict=True)
            ]

        return self._list(
            *(request, "beside.html", name, files, 0, chosen.wants, ask),
            filter=chosen,
            most=BESIDE,
        )

    def flipped(
        self, request: Request, name: str, a: str = "", b: str = "", start: Start = 0
    ) -> Response:
        files = self._files(name)
        known = _evaluations(files)
        chosen = _two_evaluations(known, name_of(a), name_of(b))

        def ask(index: RunIndex) -> list[Any]:
            return index.flipped(*chosen, limit=PAGE_ROWS + 1, offset=start)

        def is_first(file: StoredFile) -> bool:
            return file.evaluation in chosen

        return self._list(
            *(request, "flipped.html", name, files, start, is_first, ask),
            chosen=chosen,
            evaluations=known,
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
        at: Start = 0,
    ) -> Response:
        chosen = Filter(request.query_params)
        run = _kept_run(self._runs.folder(name))
        whole = run.file(file)
        with _naming(whole, row):
            stored = whole.read(row)
            record, tokens = filled(stored.record), stored.tokens
            texts, found, missing = None, None, _missing(stored)
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
                list_address=chosen.address(start=max(0, at - 1) // PAGE_ROWS * PAGE_ROWS),
                pager=self._neighbours(name, chosen, at, (file, row)) if at else (),
                link=lambda **changes: f"?{request.url.include_query_params(**changes).query}",
                json=f"{request.url.path}/json",
                is_sample=whole.evaluation is None,
                facts=_facts(record, whole.evaluation),
                prompt=[(one.role, one.shown()) for one in prompt_messages(record)],
                first_turn=min(turn, max(0, len(record["turns"]) - 1)),
                texts=Texts(),
                reasons=Texts(REASON_BYTES),
                tree=agents_of(record),
                shades=found,
                has_texts=texts is not None,
                colour=colour,
                colours=[(one, title) for one, title in COLOURS.items() if one not in missing],
                missing=[COLOURS[one] for one in missing],
                legend=LEGENDS[colour],
                token=token,
                most_tokens=TOKENS,
                num_tokens=0 if tokens is None else len(tokens.token_ids),
            )

    def _neighbours(
        self, name: str, chosen: Filter, at: int, own: tuple[str, int]
    ) -> list[tuple[str, str, str]]:
        """Return links to the trajectories before and after one in the list that led to it.

        Args:
            name: of the run.
            chosen: choices of the list.
            at: place of the trajectory there, from 1 on; a run at work has moved it since.
            own: its file and row.
        """
        start = max(0, at - 1 - PAGE_ROWS // 2)
        with RunIndex(self._runs.folder(name)) as index:
            rows = index.rows(chosen.query(PAGE_ROWS, start))
        places = [place for place, one in enumerate(rows) if (one["file"], one["row"]) == own]
        return [
            (
                relation,
                f"{title} trajectory",
                _address(name, rows[place + step], chosen, start + place + step + 1),
            )
            for place in places
            for relation, title, step in (("prev", "Previous", -1), ("next", "Next", 1))
            if 0 <= place + step < len(rows)
        ]

    def as_json(self, name: str, file: str, row: Row) -> Response:
        stored = Run(self._runs.folder(name)).file(file).read(row)
        arrays = None if stored.tokens is None else vars(stored.tokens)
        lists = arrays and {key: None if a is None else a.tolist() for key, a in arrays.items()}
        whole = {**stored.record, "tokens": lists}
        return Response(
            to_json(repair_json(whole), inf_nan_mode="null"), media_type="application/json"
        )


@contextmanager
def _naming(file: StoredFile, row: int) -> Generator[None]:
    """Let an error of JSON of another shape name where it stands."""
    try:
        yield
    except ValueError:
        raise
    except DAMAGE as exc:
        raise ValueError(f"{file.path}, row {row}, is damaged: {exc!r}; go back to others") from exc


def _links_of_steps(first: str, last: str) -> list[tuple[str, str]]:
    """Return links to other pages about the chosen steps, below the address of the run."""
    step = urlencode({"step": first})
    span = f"{step}&{urlencode({'step_to': last})}"
    found = [(f"?{step}#step", f"Numbers of step {first}"), (f"/fall?{span}", "Why did it fall?")]
    return found if first else []


def _address(name: str, row: dict[str, Any], chosen: Filter, at: int) -> str:
    """Return the address of a trajectory at a place of the list with these choices."""
    of_run, of_file = (quote(part, safe="") for part in (name, row["file"]))
    return f"/runs/{of_run}/trajectories/{of_file}/{row['row']}{chosen.address(at=at)}"


def _evaluations(files: Sequence[StoredFile]) -> list[str]:
    """Return the names of the evaluations that a choice offers."""
    return [one for file in files if (one := file.evaluation) is not None][-OPTIONS:]


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


def _missing(stored: StoredTrajectory) -> list[Colour]:
    """Return the colours for which a trajectory has no numbers."""
    tokens = stored.tokens
    arrays: dict[Colour, object] = {
        "entropy": tokens and tokens.entropies,
        "advantage": tokens and tokens.advantages,
        "ratio": tokens and tokens.learner_logprobs,
    }
    return [colour for colour, values in arrays.items() if values is None]


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
