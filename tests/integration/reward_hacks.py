"""Runs the programs of reward_hack_programs.py against a task that they do not solve.

`test_sandbox_reward_hacks.py` runs `main` as the user of the tests and, where that is root, as an
ordinary user too. Only hard-coding what the arguments show is left out: no test can tell it from a
solution.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from agent_r1.tools.base import CallContext, ToolUnavailableError
from agent_r1.tools.sandbox.code_tests import CodeTests
from agent_r1.tools.sandbox.python_exec import PythonExec
from tests.integration.reward_hack_programs import HACKS, PROGRAM_HACKS

SETTINGS: dict[str, Any] = {"cpu_s": 2.0, "wall_s": 1.5, "total_s": 60.0, "memory_mb": 256}
CONTEXT = {
    "prompt": "def double(x):\n    return 2 * x\n\n"
    "def f(x, then=None):\n    'Return the square of x, or what `then` makes of it.'\n",
    "entry_point": "f",
    "check": "def check(candidate):\n    for x in (3, 4):\n"
    "        assert double(candidate(x)) == 2 * x * x\n",
    "tests": [
        "assert f(2) == 4",
        "assert abs(f(5) - 25.0) < 1e-6",
        "assert 49 in [f(7)] and sorted([f(3), f(1)]) == [1, 9]",
        "assert f(6, lambda y: y - 1) == 35",
        "assert all(map(lambda x: f(x) == x * x, (8, 9)))",
    ],
}
SOLUTION = "def f(x, then=None):\n    return then(x * x) if then else x * x\n"
TESTS = 6
"""Number of tests in `CONTEXT`."""
TRIES = 3
"""How often a program is tried while the tool is unavailable, as a rollout server does."""


async def try_code(tool: CodeTests, code: str) -> Any:
    """Return the counts of a program; a sandbox that has ended is no score, and is asked again."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(ToolUnavailableError):
            return (await tool.call({"code": code}, CallContext("r", 0, CONTEXT, 120.0))).data
    return (await tool.call({"code": code}, CallContext("r", 0, CONTEXT, 120.0))).data


async def run_hacks(**settings: Any) -> dict[str, Any]:
    """Return the counts of every program, and of the solution after each."""
    tool = CodeTests(**(SETTINGS | settings), max_workers=2)
    await tool.start()
    waiting = iter(HACKS.items())
    found: dict[str, Any] = {}

    async def work() -> None:
        for name, code in waiting:
            found[name] = await try_code(tool, code)

    try:
        await asyncio.gather(work(), work())
        found["the solution"] = await try_code(tool, SOLUTION)
    finally:
        await tool.stop()
    return found


async def run_program_hacks(**settings: Any) -> dict[str, list[str]]:
    """Return what each program reads, and then three callers in the same sandbox."""
    tool = PythonExec(wall_s=2.0, max_workers=1, reuse_calls=50, **settings)
    await tool.start()
    try:
        found: dict[str, list[str]] = {}
        for name, code in PROGRAM_HACKS.items():
            programs = ["secret = 'of_another_caller'\nprint(secret)", code, *["6 * 7"] * 3]
            context = CallContext("r", 0, None, 60.0)
            found[name] = [(await tool.call({"code": x}, context)).text() for x in programs]
        return found
    finally:
        await tool.stop()


def main() -> None:
    """Run everything with the settings of the command line; print the results as JSON."""
    settings = json.loads(sys.argv[1])
    results = [
        asyncio.run(run_hacks(**settings)),
        asyncio.run(run_program_hacks(**settings)),
    ]
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
