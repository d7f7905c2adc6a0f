"""Write docs/results/dashboards: what the Grafana dashboards show of a run, as tables.

    .venv/bin/python scripts/dashboard_results.py http://127.0.0.1:9090 RUN_ID

Asks a Prometheus that has watched the run every query of every panel, as Grafana would ask it for
the time of the whole run. docs/observability.md says how a Prometheus watches a run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from generated import show

REPOSITORY = Path(__file__).resolve().parent.parent
BOARDS = REPOSITORY / "deploy/observe/grafana/dashboards"
PAGES = REPOSITORY / "docs/results/dashboards"
ANSWER_TIMEOUT_S = 60.0
POINTS = 30
"""Of a curve: the run is divided into as many equal parts, and a point is the end of one."""
COLUMNS = 5
"""Points that are given as numbers, as many parts apart as all have."""
BLOCKS = "▁▂▃▄▅▆▇█"
SECONDS_OF = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}
BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def render_value(value: float, unit: str) -> str:
    """Return a value as Grafana writes it in this unit."""
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "bytes":
        name, size = next(((n, s) for n, s in BYTES.items() if abs(value) >= s), ("B", 1))
        return f"{show(value / size)} {name}"
    if unit == "s":
        is_short = 0 < abs(value) < 1
        return f"{show(value * 1e3)} ms" if is_short else f"{show(value)} s"
    return show(value) + {"ops": " /s", "reqps": " /s"}.get(unit, "")


def render_curve(values: Sequence[float | None]) -> str:
    """Return a curve from its lowest value (▁) to its highest (█); a dot where there is none."""
    known = [value for value in values if value is not None]
    low, span = min(known), max(known) - min(known)

    def block(value: float) -> str:
        return BLOCKS[min(7, int(8 * (value - low) / span)) if span else 3]

    return "".join("·" if value is None else block(value) for value in values)


def render_legend(legend: str, labels: Mapping[str, str]) -> str:
    """Return the name of one series."""
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend).strip()


class Prometheus:
    """What a Prometheus knows of one run."""

    def __init__(self, url: str, run_id: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False)
        self._run_id = run_id
        config = yaml.safe_load(self._get("status/config")["yaml"])
        interval = re.fullmatch(r"(\d+)(ms|s|m|h)", config["global"]["scrape_interval"])
        assert interval is not None
        scrape_s = int(interval[1]) * SECONDS_OF[interval[2]]
        series = self._get("query", query=f'agent_r1_learner_steps_total{{run="{run_id}"}}[30d]')
        times = [float(time) for one in series["result"] for time, _ in one["values"]]
        if not times:
            raise SystemExit(f"{url} has seen no run {run_id} in the last 30 days")
        self.start_s, self.end_s = min(times), max(times)
        self.part_s = (self.end_s - self.start_s) / POINTS
        # As Grafana defines it.
        self._rate_interval_s = math.ceil(max(self.part_s + scrape_s, 4 * scrape_s))

    def _get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        return answer.raise_for_status().json()["data"]

    def curves(self, query: str) -> Iterator[tuple[dict[str, str], list[float | None]]]:
        """Ask one query of a dashboard.

        Yields:
            The labels of each series, and its value at each point; None where it has none.
        """
        filled = query.replace("$__rate_interval", f"{self._rate_interval_s}s")
        filled = filled.replace("$run", self._run_id).replace("$tool", ".*")
        start = str(self.start_s + self.part_s)
        found = self._get(
            "query_range", query=filled, start=start, end=str(self.end_s), step=str(self.part_s)
        )
        for series in found["result"]:
            values: list[float | None] = [None] * POINTS
            for time, text in series["values"]:
                value = float(text)
                number = round((time - self.start_s) / self.part_s) - 1
                values[number] = value if math.isfinite(value) else None
            if any(value is not None for value in values):
                yield series["metric"], values


def render_panel(panel: dict[str, Any], run: Prometheus) -> Iterator[str]:
    """Yield the lines of a panel: a row for each series."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    yield f"\n## {panel['title']}\n\n{panel['description']}\n"
    rows = [
        (render_legend(target["legendFormat"], labels), values)
        for target in panel["targets"]
        for labels, values in run.curves(target["expr"])
    ]
    if not rows:
        yield "No value in this run."
        return
    numbers = range(POINTS // COLUMNS - 1, POINTS, POINTS // COLUMNS)
    times = (divmod(round((number + 1) * run.part_s), 60) for number in numbers)
    yield "| | " + " | ".join(f"{m}:{s:02d}" for m, s in times) + " | |"
    yield "|---|" + "---:|" * COLUMNS + "---|"
    for name, values in rows:
        cells = ("" if (v := values[n]) is None else render_value(v, unit) for n in numbers)
        yield f"| {name} | " + " | ".join(cells) + f" | `{render_curve(values)}` |"


def render_page(board: dict[str, Any], run: Prometheus) -> str:
    """Return the page of one dashboard."""
    minutes, seconds = divmod(round(run.end_s - run.start_s), 60)
    head = (
        f"# Dashboard: {board['title']}\n\n"
        f"What this dashboard shows of a run of {minutes} minutes and {seconds} seconds, written "
        "by `scripts/dashboard_results.py`\n"
        "([how](../../observability.md#dashboards)). The columns are times since the learner's "
        "start. A curve goes from its\nlowest value to its highest; a dot is a time without a "
        "value."
    )
    lines = [head, *(line for panel in board["panels"] for line in render_panel(panel, run))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write a page for each dashboard."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="of a Prometheus that has watched the run")
    parser.add_argument("run_id")
    parser.add_argument("--out", type=Path, default=PAGES)
    given = parser.parse_args()
    run = Prometheus(given.url, given.run_id)
    given.out.mkdir(parents=True, exist_ok=True)
    for file in sorted(BOARDS.glob("*.json")):
        page = given.out / f"{file.stem}.md"
        page.write_text(render_page(json.loads(file.read_text()), run))
        print(page)


if __name__ == "__main__":
    main()
