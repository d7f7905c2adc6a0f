"""Calls to a tool service through our client, against plain httpx; and what the boundary costs.

    make bench CASE=tools ARGS="--calls 4000 --rounds 3"

One tool process, whose tool returns at once, gets 128 calls at a time: from `ToolClient`, and from
`httpx.AsyncClient` with one request for each. Then one call at a time, through the service and in
this process.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.tools.base import CallContext
from agent_r1_proto.tools import CallRequest, ToolCall
from benchmarks.harness import alternate, compare, read_options, write_report
from benchmarks.plugins.bench_tools import Shout
from benchmarks.processes import PLUGINS, announced_url, process

IN_FLIGHT = 128
WARM_CALLS = 512
SINGLE_CALLS = 500
TIMEOUT_S = 60.0
ARGUMENTS = {"text": "the quick brown fox"}
Call = Callable[[int], Awaitable[object]]


async def load(call: Call, count: int, in_flight: int = IN_FLIGHT) -> dict[str, float]:
    """Make calls, some at a time; return how many a second, and quantiles of their milliseconds."""
    latencies: list[float] = []
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            started = time.perf_counter()
            await call(number)
            latencies.append(1000 * (time.perf_counter() - started))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    rate = count / (time.perf_counter() - started)
    quantiles = statistics.quantiles(latencies, n=100)
    return {"calls/s": rate, "p50 ms": quantiles[49], "p99 ms": quantiles[98]}


@asynccontextmanager
async def our_client(url: str) -> AsyncIterator[Call]:
    """Yield a call through the client of the rollout service."""
    client = ToolClient({"shout": url}, timeout_s=TIMEOUT_S, max_requests=IN_FLIGHT)
    await client.start(wait_s=60)
    try:
        yield lambda number: client.call("shout", dict(ARGUMENTS), rollout_id=f"r{number}", turn=0)
    finally:
        await client.stop()


@asynccontextmanager
async def plain_client(url: str) -> AsyncIterator[Call]:
    """Yield a call as a request of its own."""
    limits = httpx.Limits(max_connections=IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(limits=limits, timeout=TIMEOUT_S, trust_env=False) as client:

        async def call(number: int) -> object:
            asked = ToolCall(
                name="shout",
                arguments=dict(ARGUMENTS),
                rollout_id=f"r{number}",
                turn=0,
                timeout_s=TIMEOUT_S,
            )
            body = CallRequest(calls=[asked]).model_dump_json()
            response = await client.post(f"{url}/call", content=body, headers=headers)
            return response.raise_for_status().json()

        yield call


@asynccontextmanager
async def no_client(_: str) -> AsyncIterator[Call]:
    """Yield a call in this process."""
    tool = Shout()
    yield lambda number: tool.call(dict(ARGUMENTS), CallContext(f"r{number}", 0, None, TIMEOUT_S))


def measure(client: Callable, url: str, count: int, in_flight: int = IN_FLIGHT) -> dict[str, float]:
    """Load a client that has warmed up."""

    async def run() -> dict[str, float]:
        async with client(url) as call:
            await load(call, WARM_CALLS, in_flight)
            return await load(call, count, in_flight)

    return asyncio.run(run())


def main() -> None:
    """Start the tool and measure."""
    options = read_options(__doc__, calls=4000, rounds=3)
    command = [Path(sys.executable).with_name("agent-r1"), "serve", "tool", "bench_tools:Shout"]
    with tempfile.TemporaryDirectory() as folder:
        words = [*command, "--announce-dir", folder]
        with process(*words, cwd=PLUGINS) as tool:
            url = announced_url(Path(folder), "shout", tool)
            sides = {"ours": our_client, "other": plain_client}
            found = alternate(
                {name: partial(measure, one, url, options.calls) for name, one in sides.items()},
                options.rounds,
            )
            alone = [
                measure(one, url, SINGLE_CALLS, 1)["p50 ms"] for one in (our_client, no_client)
            ]
    rows = [
        compare(
            what, [one[what] for one in found["ours"]], [one[what] for one in found["other"]], goal
        )
        for what, goal in (("calls/s", "≥ 5"), ("p99 ms", "≤ 0.1"))
    ]
    what = "one call at a time, p50 ms over a call in this process"
    write_report("tools", [*rows, {"what": what, "ours": alone[0] - alone[1], "goal": "≤ 3"}])


if __name__ == "__main__":
    main()
