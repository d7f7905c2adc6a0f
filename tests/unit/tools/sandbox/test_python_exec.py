"""Settings of the tools that run code, the texts models read, the filter; and a few real runs."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import tempfile
import venv
from pathlib import Path
from typing import Any

import pytest

from agent_r1.sandbox.outcome_text import describe_failure, shorten
from agent_r1.sandbox.program_run import RunResult
from agent_r1.sandbox.seccomp import compile_filter
from agent_r1.sandbox.settings import SandboxSettings
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import CallContext, ToolBusyError
from agent_r1.tools.sandbox.code_tests import CodeTests
from agent_r1.tools.sandbox.python_exec import PythonExec
from agent_r1_proto.tools import ToolResult
from tests.support.fakes import LeavingClient

SETTINGS = SandboxSettings()


@pytest.mark.parametrize("tool", [PythonExec, CodeTests])
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"wall_s": "fast"}, "settings.wall_s: Input should be a valid number"),
        ({"wall_s": 0}, "settings.wall_s: Input should be greater than 0"),
        ({"memory_mb": 1.5}, "settings.memory_mb: Input should be a valid integer"),
        ({"memory": 100}, r"memory is unknown; did you mean memory_mb\?"),
        ({"zzz": 1}, r"zzz is unknown; the keys are sandbox, cpu_s"),
        ({"sandbox": "none"}, "settings.sandbox: Input should be 'bubblewrap' or 'container'"),
        ({"preload": ["os; import x"]}, "settings.preload.0: String should match"),
        ({"wall_s": -1, "processes": 0}, r"settings.wall_s: .*; settings.processes: "),
    ],
)
def test_wrong_settings_are_named(tool: Any, settings: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        tool(**settings)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (RunResult(why="wall"), "ran longer than 10 s"),
        (RunResult(why="output"), "wrote more than 1048576 bytes"),
        (RunResult(why="memory"), "more than 512 MB of memory"),
        (RunResult(why="files"), "more than 10000 files"),
        (RunResult(why="killed"), "ended the sandbox"),
        (RunResult(why="ended", signal=24, cpu_s=4.99), "more than 5 s of CPU time"),
        (RunResult(why="ended", signal=9, cpu_s=5.5), "more than 5 s of CPU time"),
        (RunResult(why="ended", signal=9, cpu_s=0.1), "ended by SIGKILL"),
        (RunResult(why="ended", signal=11), "ended by SIGSEGV"),
        (RunResult(why="ended", exit_code=3), "exit code 3"),
        (
            RunResult(why="ended", report={"error": "MemoryError\n", "error_type": "MemoryError"}),
            "MemoryError\nMemory is limited to 512 MB.",
        ),
        (
            RunResult(why="ended", report={"error": "SystemError\n", "error_type": "SystemError"}),
            "SystemError\nMemory is limited to 512 MB.",
        ),
    ],
)
def test_every_end_has_words(result: RunResult, text: str):
    assert text in str(describe_failure(result, SETTINGS, wall_s=SETTINGS.wall_s))


def test_a_program_that_ends_well_has_not_failed():
    assert describe_failure(RunResult(why="ended", exit_code=0), SETTINGS, wall_s=1.0) is None


def test_long_text_keeps_both_ends():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("a" * 50 + "b" * 50, 10) == "aaaaa\n… [90 characters left out] …\nbbbbb"


@pytest.mark.parametrize("private_dev", [True, False])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_path_through_the_filter_ends(machine: str, private_dev: bool):
    code = compile_filter(machine, private_dev=private_dev)
    program = [struct.unpack("<HBBI", code[at : at + 8]) for at in range(0, len(code), 8)]
    assert len(program) < 4096  # BPF_MAXINSNS
    for at, (operation, true, false, value) in enumerate(program):
        if operation & 7 == 5:  # a jump
            assert at + 1 + max(true, false) < len(program)
        if operation == 0x20:  # a load: aligned, within struct seccomp_data
            assert value % 4 == 0
            assert value < 64
    assert program[-1][:1] == (6,)  # a return


def test_an_unknown_machine_is_named():
    with pytest.raises(ValueError, match="'sparc'"):
        compile_filter("sparc", private_dev=True)


async def run(tool: PythonExec, code: str, timeout_s: float = 30.0) -> ToolResult:
    return await tool.call({"code": code}, CallContext("r/0/0/0/0", 0, None, timeout_s))


async def try_to_start(tool: PythonExec) -> None:
    try:
        await tool.start()
    except ValueError as exc:
        if "bwrap" not in str(exc):
            raise
        pytest.skip(str(exc))


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("print(1)\n2 + 2", "ok", "1\n4"),
        ("x = 1", "ok", "(the code printed nothing)"),
        ("\ufeffprint(1)", "ok", "1"),
        ("'text'", "ok", "'text'"),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)", "ok", "out\nerr"),
        ("exit()", "ok", "(the code printed nothing)"),
        ("raise SystemExit(3)", "error", "Error: the code ended with exit code 3."),
        ("input()", "error", "EOFError: EOF when reading a line"),
        ("if True\n    pass", "error", "SyntaxError: expected ':'"),
        ("def f(n):\n    return 1 / n\nf(0)", "error", "ZeroDivisionError: division by zero"),
        ("if __name__ == '__main__':\n    print('main')", "ok", "main"),
        (
            "import subprocess\nsubprocess.run(['echo', 'x'], capture_output=True).stdout",
            "ok",
            "b'x\\n'",
        ),
        (
            "import multiprocessing as m\nwith m.Pool(2) as p:\n    print(p.map(abs, [-1, 2]))",
            "ok",
            "[1, 2]",
        ),
        ("import asyncio\nasyncio.run(asyncio.sleep(0, 5))", "ok", "5"),
        ("def f(x: int): ...\nf.__annotations__", "ok", "{'x': <class 'int'>}"),
        ("import numpy\nint(numpy.arange(4).sum())", "ok", "6"),
    ],
)
async def test_what_the_model_reads(code: str, status: str, text: str):
    tool = PythonExec(max_workers=1)
    await try_to_start(tool)
    try:
        result = await run(tool, code)
    finally:
        await tool.stop()
    assert (result.status, result.text()[-len(text) :]) == (status, text)
    assert "guest/" not in result.text()  # tracebacks show the program's frames only


async def test_calls_wait_for_a_sandbox_and_then_give_up():
    tool = PythonExec(max_workers=1, wall_s=3.0)
    await try_to_start(tool)
    try:
        busy = asyncio.create_task(run(tool, "import time\ntime.sleep(2)\nprint('done')"))
        await asyncio.sleep(0.2)
        with pytest.raises(ToolBusyError, match="all 1 sandboxes were busy"):
            await run(tool, "1", timeout_s=1.0)
        assert (await run(tool, "1")).text() == "1"
        assert (await busy).text() == "done"
    finally:
        await tool.stop()


async def test_programs_that_hang_have_failed_however_many_wait():
    tool = PythonExec(max_workers=1, wall_s=1.0)
    await try_to_start(tool)

    async def call(code: str) -> str:
        while True:  # as a rollout server does
            with contextlib.suppress(ToolBusyError):
                return (await run(tool, code, timeout_s=4.5)).text()

    try:
        texts = await asyncio.gather(*map(call, ["import time\ntime.sleep(9)"] * 4 + ["6 * 7"]))
    finally:
        await tool.stop()
    assert texts == ["Error: the code ran longer than 1 s and was stopped."] * 4 + ["42"]


async def test_a_cancelled_call_ends_its_program():
    tool = PythonExec(max_workers=1)
    await try_to_start(tool)
    try:
        endless = asyncio.create_task(run(tool, "while True:\n    pass"))
        await asyncio.sleep(0.3)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        assert (await run(tool, "1")).text() == "1"
    finally:
        await tool.stop()


async def test_calls_nobody_waits_for_any_more_give_their_sandbox_back():
    tool = PythonExec(max_workers=1, wall_s=60.0)
    app = create_app(ToolService(tool, instance="here-1"))
    call = {"name": "python_exec", "arguments": {"code": "import time\ntime.sleep(60)"}}
    body = {"calls": [call | {"rollout_id": "r/0/0/0/0", "turn": 0, "timeout_s": 100.0}]}
    try:
        async with app.router.lifespan_context(app):
            client = LeavingClient(app)
            calls = [asyncio.create_task(client.post("/call", body)) for _ in range(20)]
            await asyncio.sleep(0.2)  # one runs, the others wait
            client.leave()
            await asyncio.wait_for(asyncio.gather(*calls), 20.0)
            assert (await run(tool, "1", timeout_s=20.0)).text() == "1"
    except ValueError as exc:
        pytest.skip(str(exc))


async def test_packages_below_the_temporary_folder_are_found():
    # The sandbox has a /tmp of its own, which must not hide them.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        python = Path(folder, "clone", ".venv", "bin", "python")
        venv.create(python.parents[1], with_pip=False, symlinks=True)
        (packages,) = python.parents[1].glob("lib/python*/site-packages")
        (packages / "only_there.py").write_text("value = 42\n")
        tool = PythonExec(max_workers=1, python=str(python), reuse_calls=5)
        await try_to_start(tool)
        look = "import only_there, os\nprint(only_there.value, len(os.listdir('/tmp')))"
        spoil = (
            "import os\nopen('/tmp/own', 'w').close()\n"
            f"for name in {[folder, f'{folder}/clone', str(packages)]}:\n    try:\n"
            "        os.rename(name, name + '-gone')\n        print('ESCAPED')\n"
            "    except OSError:\n        pass\n    try:\n"
            "        open(name + '/new', 'w')\n        print('ESCAPED')\n"
            "    except OSError:\n        pass\n"
        )
        try:
            for _ in range(2):
                assert (await run(tool, look)).text() == "42 1"
                assert (await run(tool, spoil)).text() == "(the code printed nothing)"
        finally:
            await tool.stop()


async def test_an_interpreter_that_is_none_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot be started.*Python 3.10 or newer"):
        await PythonExec(python=str(tmp_path / "python")).start()
    with pytest.raises(ValueError, match="is not a Python interpreter"):
        await PythonExec(python="/bin/echo").start()


async def test_a_refused_sandbox_is_an_error_with_its_remedy(tmp_path: Path):
    refusing = tmp_path / "bwrap"
    refusing.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    refusing.chmod(0o755)
    with pytest.raises(ValueError, match=r"No permissions.*security_opt"):
        await PythonExec(bwrap=str(refusing)).start()
