"""The pages that show a run's dashboards as tables, from a Prometheus that always says the same."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "dashboard_results.py"
START, PART = 1000, 10
"""The run takes 300 s: 30 parts of 10 s."""
RISING = [[START + PART * n, "NaN" if n == 2 else str(n / 30)] for n in range(1, 31)]


def answer(path: str, asked: dict[str, list[str]]) -> Any:
    if path.endswith("status/config"):
        return {"yaml": "global: {scrape_interval: 5s}"}
    if path.endswith("query"):
        known = 'run="mine"' in asked["query"][0]
        return {"result": [{"values": [[START, "0"], [START + 300, "9"]]}] if known else []}
    if "reward_component_mean" not in asked["query"][0]:
        return {"result": []}
    return {"result": [{"metric": {"component": "exact_match"}, "values": RISING}]}


@contextmanager
def prometheus() -> Iterator[tuple[str, list[dict[str, list[str]]]]]:
    """Yield the address of a stand-in, and what it was asked about the time of the run."""
    ranges: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            asked = parse_qs(url.query)
            if url.path.endswith("query_range"):
                ranges.append(asked)
            body = json.dumps({"data": answer(url.path, asked)}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", ranges
        finally:
            server.shutdown()


def write_pages(url: str, run_id: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), url, run_id, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_panel_is_asked_for_the_whole_run_and_shown(tmp_path: Path) -> None:
    with prometheus() as (url, ranges):
        done = write_pages(url, "mine", tmp_path)
    assert done.returncode == 0, done.stderr
    boards = sorted((REPOSITORY / "deploy/observe/grafana/dashboards").glob("*.json"))
    assert sorted(page.stem for page in tmp_path.iterdir()) == [board.stem for board in boards]
    panels = [panel for board in boards for panel in json.loads(board.read_text())["panels"]]
    assert len(ranges) == sum(len(panel["targets"]) for panel in panels)
    for asked in ranges:
        times = [float(asked[name][0]) for name in ("start", "end", "step")]
        assert times == [START + PART, START + 300, PART]
        assert "$" not in asked["query"][0]
    # Grafana's interval of rates: 4 scrapes of 5 s, which is more than a part and a scrape, 15 s.
    assert any("[20s]" in asked["query"][0] for asked in ranges)

    page = (tmp_path / "learning.md").read_text()
    _, _, panel = page.partition("## Reward components")
    # The points 6, 12, 18, 24 and 30 of 30, each 10 s after the one before.
    assert "| | 1:00 | 2:00 | 3:00 | 4:00 | 5:00 | |" in panel
    assert "| exact_match | 0.2 | 0.4 | 0.6 | 0.8 | 1 | `▁·▁▁" in panel
    assert page.count("No value in this run.") == page.count("## ") - 1


def test_a_run_that_prometheus_has_not_seen_is_named(tmp_path: Path) -> None:
    with prometheus() as (url, _):
        done = write_pages(url, "another", tmp_path)
    assert done.returncode == 1
    assert f"{url} has seen no run another in the last 30 days" in done.stderr
