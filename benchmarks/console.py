"""The pages of the console over 20 runs of 2,000 steps, one of which has 100,000 trajectories.

    make bench CASE=console ARGS="--runs 20 --steps 2000 --trajectories 100000"

Writes run folders with 100 metrics a step, and asks for each page as a browser does, without a
network. CPU time says the same while others work on the machine. "first" is a console that has just
started; "again" is the median of --rounds later views. Of the curves, "again" comes after one more
step of one run, "unchanged" without one. The index of trajectories is built before.

A page of more than 100 rows or 200 kB, and a query that walks a table without an index, end it with
an error. With --browser 1, Chromium turns pages and follows curves, and its heap is measured.
make bench CASE=console ARGS="--runs 2 --steps 40 --trajectories 2000" is a form of seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from agent_r1.console.app import create_app
from agent_r1.console.pages import MOST_RUNS
from agent_r1.console.runs import Runs
from agent_r1.runs.index import RunIndex
from agent_r1.runs.store import StoredTrajectory, TrajectoryStore
from agent_r1.runtime.files.run_folder import CONFIG_FILE
from agent_r1.runtime.http.token import token_headers
from agent_r1_proto.parts import TextPart
from agent_r1_proto.trajectory import ToolCallRecord
from benchmarks.harness import Row, read_options, write_report
from tests.support.browser import chromium, heap_bytes
from tests.support.builders import rollout_task, scored, stored
from tests.support.config_scene import write_scene
from tests.support.console_scene import append_lines, step_line, write_run
from tests.support.query_plans import table_scans
from tests.support.served import TOKEN, served

METRICS = 100
MS = 1000
GROUP = 5
"""Samples of a question."""
TASKS = 500
"""Questions; each evaluation asks all of them."""
FALL_STEPS = 40
"""Most steps of the fall that is explained."""
MOST_ROWS = 100
MOST_BYTES = 200_000
TURNED = 100
"""Pages of the list that a browser turns."""
FOLLOWED_S = 60
"""Time for which a browser follows the curves of all runs, with a new step every second."""
RUN = "/runs/run0"
HTML = re.compile(r"<tbody>.*?</tbody>", re.DOTALL)


def write_runs(folder: Path, runs: int, steps: int, trajectories: int) -> list[Path]:
    """Write run folders, the first one with trajectories."""
    scene = write_scene(folder / "scene")
    more = {f"area{number % 10}/metric_{number}": number + 0.123456789 for number in range(METRICS)}
    found = [write_run(scene, folder / "runs" / f"run{number}") for number in range(runs)]
    for number, run in enumerate(found):
        _vary(run / CONFIG_FILE, number)
        lines = (step_line(s, **more, **_falling(s, steps)) for s in range(1, steps + 1))
        append_lines(run / "metrics.jsonl", lines)
        (run / "trajectories").mkdir()
    store = TrajectoryStore(found[0], 100.0)
    samples = list(_samples(GROUP * 2))
    each = each_step(trajectories, steps)
    for step in range(1, steps + 1):
        store.write(f"step_{step:06d}", (_sample(samples, step, n) for n in range(each)))
    for place, name in enumerate(("before", "after")):
        store.write(f"eval_{name}", (_sample(samples, place, GROUP * n) for n in range(TASKS)))
    store.write("eval_reasons", [_with_reasons(samples[0])])
    return found


def _vary(config_file: Path, number: int) -> None:
    """Let a run differ from the others in as many keys as a page has rows, and more."""
    config = json.loads(config_file.read_text())
    file = f"/data/a/long/path/to/the/questions/of/run/{number}/" + "x" * 60
    sets = {f"set{one}": {"source": f"{file}/{one}.jsonl"} for one in range(MOST_ROWS + 10)}
    config["evaluation"]["sets"] = sets
    config_file.write_text(json.dumps(config))


def _falling(step: int, steps: int) -> dict[str, float]:
    """Return a reward that falls after half of the steps."""
    return {"reward/mean": (0.3 if step > steps // 2 else 0.8) + step % 3 / 100}


def _with_reasons(one: StoredTrajectory) -> StoredTrajectory:
    """Return a trajectory with as many components as a page shows, which all say why."""
    names = [f"component_{number}" for number in range(MOST_ROWS)]
    reward = one.record["reward"] | {
        "components": dict.fromkeys(names, 0.5),
        "reasons": dict.fromkeys(names, 'It says "the lighthouse", and that is right. ' * 40),
    }
    return replace(one, record=one.record | {"reward": reward})


def each_step(trajectories: int, steps: int) -> int:
    """Return how many trajectories a step has, so that all are as many as wanted."""
    return max(GROUP, (trajectories - 2 * TASKS) // steps)


def _samples(count: int) -> Iterator[StoredTrajectory]:
    """Yield trajectories with a call, whose texts have words of their own."""
    for number in range(count):
        part = TextPart(text=f"Passage {number}: " + "the lighthouse of the harbour " * 8)
        call = ToolCallRecord(end_token_index=4, tool="search", status="ok", parts=[part])
        yield stored(scored(rollout_task(), answer=f"keeper {number}", calls=[call]))


def _sample(samples: list[StoredTrajectory], step: int, number: int) -> StoredTrajectory:
    """Return sample `number` of a step."""
    one = samples[(step * 7 + number) % len(samples)]
    group, reward = step * 1000 + number // GROUP, (step * 31 + number * 17) % 101 / 100
    scores = {"total": reward, "components": {"em": reward, "format": 1 - reward}}
    changes = {
        "step": step,
        "group_id": group,
        "sample_index": number % GROUP,
        "task_id": f"q{group % TASKS}",
        "rollout_id": f"{step}-{number}",
        "metadata": {"set": "near" if group % 3 else "far"},
        "reward": one.record["reward"] | scores,
        "staleness": number % 4,
        "policy_versions": [step],
    }
    return replace(one, record={**one.record, **changes})


def pages_of(runs: list[Path], steps: int, last: int) -> dict[str, str]:
    """Return the address of each page; `last` is a row of the last one."""
    chosen = "&".join(f"run={run.name}" for run in runs[:MOST_RUNS])
    listed = f"{RUN}/trajectories"
    half, fell = steps // 2, min(steps, steps // 2 + FALL_STEPS)
    within = "component=em&value=0.2&value_to=0.4"
    return {
        "runs": "/",
        "a run, and a step of it": f"{RUN}?step={steps // 2}",
        "compare": f"/compare?{chosen}",
        "curves, the page": f"/curves?{chosen}",
        "evaluations": "/evaluations",
        "services": f"{RUN}/services",
        "trajectories, the newest": listed,
        "a step": f"{listed}?step={steps // 2}",
        "by reward, of one set": f"{listed}?set=far&sort=reward&order=up",
        "by a component within bounds": f"{listed}?{within}&sort=reward/em",
        "of a tool, version and staleness": f"{listed}?tool=search&version={steps}&staleness=1",
        "of a tool, by reward": f"{listed}?tool=search&sort=reward",
        "a question over steps": f"{listed}?task=q7&sort=step",
        "a word that all have": f"{listed}?text=lighthouse",
        "a phrase, by tokens": f'{listed}?text="keeper+3"&sort=num_tokens',
        "a word that none has": f"{listed}?text=zeppelin",
        "the last page": f"{listed}?start={last}",
        "groups": f"{RUN}/groups",
        "groups, the last page": f"{RUN}/groups?start={max(0, last // GROUP - 50)}",
        "side by side": f"{RUN}/beside?step={steps}",
        "flipped answers": f"{RUN}/flipped?a=before&b=after",
        "a trajectory": f"{listed}/step_{steps:06d}.parquet/1?colour=logprob",
        "the same, come to from the list": f"{listed}/step_{steps:06d}.parquet/1?sort=reward&at=50",
        "a trajectory with 100 reasons": f"{listed}/eval_reasons.parquet/0",
        "why it fell": f"{RUN}/fall?step={half + 1}&step_to={fell}",
    }


async def ask(client: httpx.AsyncClient, path: str, **headers: str) -> tuple[float, httpx.Response]:
    """Return the CPU milliseconds of an answer, and the answer."""
    started = time.process_time()
    answer = await client.get(path, headers={"accept": "text/html", **headers})
    took = (time.process_time() - started) * MS
    if answer.status_code not in (200, 304):
        raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
    rows = max((table.count("<tr>") for table in HTML.findall(answer.text)), default=0)
    # The numbers of one step have no next page: three times as many (pages.py).
    if len(answer.content) > MOST_BYTES or (rows > MOST_ROWS and "?step=" not in path):
        raise RuntimeError(f"{path}: {rows} rows, {len(answer.content)} bytes")
    return took, answer


async def measure(runs: list[Path], steps: int, trajectories: int, rounds: int) -> list[Row]:
    """Ask for every page, and check the plans of what that asks of the index."""
    started = time.process_time()
    with RunIndex(runs[0]) as index:
        index.refresh()
    built = (time.process_time() - started) * MS
    first: Row = {"page": "(the index is built)", "kB": index.path.stat().st_size / 1000}
    statements: list[str] = []
    connect = RunIndex._connect

    def connect_traced(self: RunIndex) -> sqlite3.Connection:
        database = connect(self)
        database.set_trace_callback(statements.append)
        return database

    RunIndex._connect = connect_traced
    try:
        rows = await _ask_all(runs, steps, each_step(trajectories, steps) * steps, rounds)
    finally:
        RunIndex._connect = connect
    with RunIndex(runs[0]) as index:
        if scans := table_scans(index._db, statements):
            raise RuntimeError(f"queries without an index: {scans}")
    return [first | {"first (CPU ms)": built}, *rows]


async def _ask_all(runs: list[Path], steps: int, last: int, rounds: int) -> list[Row]:
    chosen = "&".join(f"run={run.name}" for run in runs[:MOST_RUNS])
    series = f"/api/series?{chosen}&metric=reward/mean&smooth=0.6"
    rows: list[Row] = []
    transport = httpx.ASGITransport(app=create_app(Runs(runs[0].parent), None))
    async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
        for what, path in pages_of(runs, steps, last).items():
            first, answer = await ask(client, path)
            again = [(await ask(client, path))[0] for _ in range(rounds)]
            rows.append(_row(what, answer, first, again))
        first, answer = await ask(client, series)
        again: list[float] = []
        for number in range(1, rounds + 1):
            append_lines(runs[0] / "metrics.jsonl", [step_line(steps + number)])
            again.append((await ask(client, series))[0])
        rows.append(_row("curves, a smoothed metric of all runs", answer, first, again))
        tag = (await ask(client, series))[1].headers["etag"]
        unchanged = [await ask(client, series, **{"if-none-match": tag}) for _ in range(rounds)]
        answer = unchanged[0][1]
        rows.append(_row("curves, unchanged", answer, unchanged[0][0], [ms for ms, _ in unchanged]))
    return rows


def _row(what: str, answer: httpx.Response, first: float, again: list[float]) -> Row:
    times: dict[str, Any] = {"first (CPU ms)": first, "again (CPU ms)": statistics.median(again)}
    return {"page": what, "kB": len(answer.content) / 1000, **times}


def read_heap(runs: list[Path]) -> dict[str, list[float]]:
    """Return MB of a browser's heap: while it turns pages, and while it follows curves."""
    found: dict[str, list[float]] = {"turning pages": [], "following curves": []}
    chosen = "&".join(f"run={run.name}" for run in runs[:MOST_RUNS])
    app = create_app(Runs(runs[0].parent), None)
    with served(nullcontext(app)) as url, chromium() as browser:
        page = browser.new_page(extra_http_headers=token_headers(TOKEN))
        page.set_default_timeout(60_000)
        page.goto(f"{url}{RUN}/trajectories")
        for _ in range(TURNED):
            found["turning pages"].append(heap_bytes(page) / 1e6)
            page.get_by_role("link", name="Next").click()
            page.get_by_role("link", name="Previous").wait_for()
        page.goto(f"{url}/curves?{chosen}&metric=reward/mean&metric=time/step_s")
        page.locator(".plot canvas").nth(1).wait_for()
        last = 10**6
        until = time.monotonic() + FOLLOWED_S
        while time.monotonic() < until:
            last += 1
            for run in runs[:MOST_RUNS]:
                append_lines(run / "metrics.jsonl", [step_line(last)])
            page.wait_for_timeout(MS)
            found["following curves"].append(heap_bytes(page) / 1e6)
    return found


def main() -> None:
    """Measure, and write the report."""
    options = read_options(
        __doc__, runs=MOST_RUNS, steps=2000, trajectories=100_000, rounds=7, browser=0
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        runs = write_runs(Path(folder), options.runs, options.steps, options.trajectories)
        sizes = (options.steps, options.trajectories, options.rounds)
        rows = asyncio.run(measure(runs, *sizes))
        found = read_heap(runs) if options.browser else {}
    heap = {
        what: {"first": round(mb[0], 2), "most": round(max(mb), 2), "last": round(mb[-1], 2)}
        for what, mb in found.items()
    }
    print(f"MB of the browser's heap: {heap}")
    write_report("console", rows, **vars(options), metrics=METRICS, heap_mb=heap)


if __name__ == "__main__":
    main()
