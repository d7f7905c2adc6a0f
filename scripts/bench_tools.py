"""Calls to a tool service through our client, against plain httpx; and what the boundary costs.

    python scripts/bench_tools.py [--calls 4000] [--rounds 3]

Starts one tool process (a tool that returns at once) and calls it with 128 calls in flight: by
`ToolClient`, and by `httpx.AsyncClient` with one request per call. Then one call at a time, through
the service and in this process. Rounds alternate. Writes runs/bench/tools.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from agent_r1.rollout.tool_calls.client import ToolClient
from agent_r1.tools.base import CallContext, Tool
from agent_r1_proto.tools import CallRequest, ToolCall

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench" / "tools.json"
IN_FLIGHT = 128
TIMEOUT_S = 60.0
SINGLE_CALLS = 500
ARGUMENTS = {"text": "the quick brown fox"}


class Shout(Tool):
    """Answers at once: what is measured is everything around it."""

    name = "shout"
    description = "Repeats a text in capitals."
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }
    max_batch = 64  # as the search tool; calls of one request are answered together

    async def call(self, arguments, context):
        """Repeat."""
        return str(arguments["text"]).upper()


async def load(call: Callable[[int], Awaitable[object]], count: int) -> tuple[float, float]:
    """Run `count` calls, IN_FLIGHT at a time.

    Returns:
        calls per second and the 99th percentile of their latencies in seconds.
    """
    latencies: list[float] = []
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            started = time.perf_counter()
            await call(number)
            latencies.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    return count / (time.perf_counter() - started), statistics.quantiles(latencies, n=100)[98]


async def single(call: Callable[[int], Awaitable[object]]) -> float:
    """Return the median latency of calls one after another, in seconds."""
    latencies: list[float] = []
    for number in range(SINGLE_CALLS):
        started = time.perf_counter()
        await call(number)
        latencies.append(time.perf_counter() - started)
    return statistics.median(latencies)


async def measure(url: str, calls: int, rounds: int) -> list[dict[str, Any]]:
    """Measure both clients in alternating rounds."""
    client = ToolClient({"shout": url}, timeout_s=TIMEOUT_S, max_requests=IN_FLIGHT)
    await client.start(wait_s=60)
    tool = Shout()
    limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    found: dict[str, list[float]] = {name: [] for name in ("ours", "p99", "plain", "plain_p99")}

    async def ours(number: int) -> object:
        return await client.call("shout", dict(ARGUMENTS), rollout_id=f"r{number}", turn=0)

    async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False) as plain_client:

        async def plain(number: int) -> object:
            call = ToolCall(
                name="shout",
                arguments=dict(ARGUMENTS),
                rollout_id=f"r{number}",
                turn=0,
                timeout_s=TIMEOUT_S,
            )
            body = CallRequest(calls=[call]).model_dump_json()
            headers = {"content-type": "application/json"}
            response = await plain_client.post(f"{url}/call", content=body, headers=headers)
            response.raise_for_status()
            return response.json()

        async def inside(number: int) -> object:
            return await tool.call(dict(ARGUMENTS), CallContext(f"r{number}", 0, None, TIMEOUT_S))

        await load(ours, 512)
        await load(plain, 512)
        for number in range(1, rounds + 1):
            for name, call in (("ours", ours), ("plain", plain)):
                rate, p99 = await load(call, calls)
                found[name].append(rate)
                found["p99" if name == "ours" else "plain_p99"].append(p99)
                print(f"round {number}  {name:5}  {rate:8.0f} calls/s  p99 {p99 * 1e3:.1f} ms")
        boundary = (await single(ours) - await single(inside)) * 1e3
    await client.stop()
    middle = {name: statistics.median(values) for name, values in found.items()}
    return [
        entry("calls/s, 128 in flight", middle["ours"], middle["plain"], 5.0, "higher"),
        entry("p99 latency s, 128 in flight", middle["p99"], middle["plain_p99"], 0.1, "lower"),
        entry("service boundary, p50 ms over an in-process call", boundary, 1.0, 3.0, "lower"),
    ]


def entry(
    name: str, ours: float, other: float, goal: float, better: str, ratio: float | None = None
) -> dict[str, Any]:
    """Return one line of the report; without a `ratio`, it is that of the two numbers."""
    ratio = round(ours / other if ratio is None else ratio, 4)
    numbers = {"ratio": ratio, "ours": round(ours, 4), "other": round(other, 4), "goal": goal}
    return {"name": name, **numbers, "better": better}


def print_entries(entries: list[dict[str, Any]]) -> bool:
    """Print one line an entry; return whether every goal is met."""
    all_met = True
    for one in entries:
        above = (
            one["ratio"] - one["goal"] if one["better"] == "higher" else one["goal"] - one["ratio"]
        )
        all_met &= above >= 0
        print(
            f"{one['name']}: ours {one['ours']:g}, other {one['other']:g}, ratio {one['ratio']:g} "
            f"(goal {one['goal']:g}, {'met' if above >= 0 else 'missed'})"
        )
    return all_met


def write_entries(entries: list[dict[str, Any]]) -> None:
    """Put entries into the report, in place of those with their names."""
    names = {one["name"] for one in entries}
    earlier = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else []
    kept = [one for one in earlier if one["name"] not in names]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps([*kept, *entries], indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Start the tool, measure, write the report."""
    parser = argparse.ArgumentParser(description="Measure calls to a tool service.")
    parser.add_argument("--calls", type=int, default=4000, help="calls of one round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(Path(sys.executable).with_name("agent-r1")), "serve", "tool"]
        command += ["bench_tools:Shout", "--announce-dir", scratch]
        with (Path(scratch) / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT / "scripts", stdout=log, stderr=log)
        try:
            file = Path(scratch) / "shout.json"
            while not file.exists():
                if process.poll() is not None:
                    sys.exit((Path(scratch) / "log").read_text())
                time.sleep(0.05)
            url = json.loads(file.read_text())["url"]
            entries = asyncio.run(measure(url, arguments.calls, arguments.rounds))
        finally:
            process.terminate()
            process.wait()
    write_entries(entries)
    print_entries(entries)
    print(f"report: {OUT}")


if __name__ == "__main__":
    main()
