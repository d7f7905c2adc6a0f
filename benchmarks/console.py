"""The pages of the console over 20 runs of 2,000 steps: milliseconds of CPU time, and bytes.

    make bench CASE=console ARGS="--runs 20 --steps 2000"

Writes run folders with 100 metrics a step and asks for each page as a browser does, without a
network. CPU time says the same while others work on the machine. "first" is a console that has just
started; "again" is the median of --rounds later views. Of the curves, "again" comes after one more
step of one run, "unchanged" without one.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from agent_r1.console.app import create_app
from agent_r1.console.pages import MOST_RUNS
from agent_r1.console.runs import Runs
from benchmarks.harness import Row, read_options, write_report
from tests.support.config_scene import write_scene
from tests.support.console_scene import append_lines, step_line, write_run

METRICS = 100
MS = 1000


def write_runs(folder: Path, runs: int, steps: int) -> list[Path]:
    """Write run folders."""
    scene = write_scene(folder / "scene")
    more = {f"area{number % 10}/metric_{number}": number + 0.123456789 for number in range(METRICS)}
    found = [write_run(scene, folder / "runs" / f"run{number}") for number in range(runs)]
    for run in found:
        append_lines(run / "metrics.jsonl", (step_line(s, **more) for s in range(1, steps + 1)))
    return found


async def ask(client: httpx.AsyncClient, path: str, **headers: str) -> tuple[float, httpx.Response]:
    """Return the CPU milliseconds of an answer, and the answer."""
    started = time.process_time()
    answer = await client.get(path, headers={"accept": "text/html", **headers})
    took = (time.process_time() - started) * MS
    if answer.status_code not in (200, 304):
        raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
    return took, answer


async def measure(runs: list[Path], steps: int, rounds: int) -> list[Row]:
    """Ask for every page."""
    chosen = "&".join(f"run={run.name}" for run in runs[:MOST_RUNS])
    series = f"/api/series?{chosen}&metric=reward/mean&smooth=0.6"
    pages = {
        "runs": "/",
        "a run, and a step of it": f"/runs/run0?step={steps // 2}",
        "compare": f"/compare?{chosen}",
        "curves, the page": f"/curves?{chosen}",
    }
    rows: list[Row] = []
    transport = httpx.ASGITransport(app=create_app(Runs(runs[0].parent), None))
    async with httpx.AsyncClient(transport=transport, base_url="http://console") as client:
        for what, path in pages.items():
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


def main() -> None:
    """Measure, and write the report."""
    options = read_options(__doc__, runs=MOST_RUNS, steps=2000, rounds=7)
    with tempfile.TemporaryDirectory() as folder:
        runs = write_runs(Path(folder), options.runs, options.steps)
        rows = asyncio.run(measure(runs, options.steps, options.rounds))
    write_report("console", rows, runs=options.runs, steps=options.steps, metrics=METRICS)


if __name__ == "__main__":
    main()
