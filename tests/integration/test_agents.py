"""The service that runs agents, with its real sandbox: ends, walls, attaching, many at once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import socket
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.sandbox.processes import find_children, find_tree
from agent_r1.tools.agents.tool import AgentTool
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import CallContext, ToolUnavailableError
from agent_r1.tools.config import ToolConfig
from agent_r1_proto.agents import MAX_OUTPUT_CHARS, AgentEnd
from tests.support.fakes import LeavingClient
from tests.support.model_gateway import KEY, ModelGateway

REPOSITORY = Path(__file__).resolve().parents[2]
UNREACHABLE = "http://127.0.0.1:9/sessions/s1/v1"
GONE_TIMEOUT_S = 10.0

ASK = """
import os, sys, openai
client = openai.OpenAI()
question = sys.stdin.read()
answer = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": question}]
)
print(answer.choices[0].message.content)
"""
CLASSES = '''
import asyncio, os, sys, time
from openai import AsyncOpenAI
from agent_r1 import Agent

class Ask(Agent):
    version = "7"

    async def run(self, task, model):
        print("working on", task.id, task.metadata["level"])
        client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
        messages = [{"role": one.role, "content": one.content} for one in task.prompt]
        answer = await client.chat.completions.create(model=model.name, messages=messages)
        return answer.choices[0].message.content

class Fails(Agent):
    async def run(self, task, model):
        print("so far")
        raise KeyError("no plan")

class Broken(Agent):
    def __init__(self):
        raise RuntimeError("no licence")

    async def run(self, task, model):
        return None

class Number(Agent):
    async def run(self, task, model):
        return 42

class Runs(Agent):
    async def run(self, task, model):
        exec(task.prompt[-1].content)
'''


def attempt(url: str = UNREACHABLE, *, prompt: str = "Capital?", timeout_s: float = 20.0) -> Any:
    """Return the `tool_context` of a call."""
    task = {"id": "q1", "prompt": [{"role": "user", "content": prompt}], "metadata": {"level": 3}}
    return {"task": task, "url": url, "key": KEY, "model": "policy", "timeout_s": timeout_s}


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of agents, with a file beside it that no agent may read; returns its name."""
    name = f"agents_{secrets.token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(CLASSES)
    (tmp_path / "answers.jsonl").write_text("the answers\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[AgentTool]:
    tool = AgentTool(**settings)
    try:
        await tool.start()
    except ValueError as exc:
        if "namespace" not in str(exc) and "bwrap" not in str(exc):
            raise
        pytest.skip(str(exc))
    try:
        yield tool
        await asyncio.wait_for(_until_empty(tool), GONE_TIMEOUT_S)
    finally:
        await tool.stop()


async def _until_empty(tool: AgentTool) -> None:
    """Wait until nothing of an attempt is left: only bwrap and process 1 of the sandbox."""
    while len(tree(tool)) > 2:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(0.02)


def tree(tool: AgentTool) -> list[int]:
    assert tool._sandbox._process is not None
    return find_tree(tool._sandbox._process.pid)


async def run(tool: AgentTool, context: Any, rollout_id: str = "r/0/0/0/0") -> AgentEnd:
    """Make an attempt and close it."""
    try:
        return await call(tool, context, rollout_id)
    finally:
        await tool.close(rollout_id)


async def call(tool: AgentTool, context: Any, rollout_id: str = "r/0/0/0/0") -> AgentEnd:
    result = await tool.call({}, CallContext(rollout_id, 0, context, 60.0))
    return AgentEnd.model_validate(result.data)


def python(code: str) -> list[str]:
    return ["python", "-c", textwrap.dedent(code)]


# --- ends ---------------------------------------------------------------------------------------


async def test_a_program_asks_the_gateway_with_an_unmodified_sdk():
    async with ModelGateway() as gateway, running(command=python(ASK), answer="output") as tool:
        end = await run(tool, attempt(gateway.url))
    assert (end.exit, end.answer, end.error) == ("ok", "Paris", "")
    (request,) = gateway.requests
    assert request["messages"] == [{"role": "user", "content": "Capital?"}]
    assert end.latency_s > 0


async def test_a_class_asks_the_gateway_and_returns_its_answer(classes: str):
    async with ModelGateway() as gateway, running(type=f"{classes}:Ask", answer="output") as tool:
        assert tool.spec().version == "7"
        end = await run(tool, attempt(gateway.url))
    assert (end.exit, end.answer, end.output) == ("ok", "Paris", "working on q1 3")


async def test_the_last_message_is_the_answer_unless_a_key_says_otherwise(classes: str):
    async with ModelGateway() as gateway, running(type=f"{classes}:Ask") as tool:
        assert (await run(tool, attempt(gateway.url))).answer is None


@pytest.mark.parametrize(
    ("name", "exit_", "error", "output"),
    [
        ("Fails", "failed", "KeyError: 'no plan'", "so far"),
        ("Number", "failed", "TypeError: run returned int; it must return a str or None", ""),
        ("Broken", "not_started", "Broken() raised RuntimeError: no licence", ""),
    ],
)
async def test_a_class_that_fails_says_why(
    classes: str, name: str, exit_: str, error: str, output: str
):
    async with running(type=f"{classes}:{name}") as tool:
        end = await run(tool, attempt())
    assert (end.exit, end.output[: len(output)]) == (exit_, output)
    assert error in end.error
    assert "Traceback" in end.output


@pytest.mark.parametrize(
    ("command", "exit_", "error"),
    [
        (["sh", "-c", "exit 3"], "failed", "exit status 3"),
        (["sh", "-c", "echo first >&2; echo the reason >&2; exit 1"], "failed", "the reason"),
        (["sh", "-c", "kill -SEGV $$"], "failed", "ended by SIGSEGV"),
        (["no-such-program"], "not_started", "no-such-program: No such file or directory; install"),
        (["/etc/passwd"], "not_started", "/etc/passwd: Permission denied"),
    ],
)
async def test_a_program_that_fails_says_why(command: list[str], exit_: str, error: str):
    async with running(command=command) as tool:
        end = await run(tool, attempt())
    assert end.exit == exit_
    assert end.error.startswith(error)


async def test_a_program_gets_the_task_in_every_form_and_leaves_files(tmp_path: Path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys\n"
        "task = json.load(open(os.environ['AGENT_R1_TASK']))\n"
        "assert task['metadata'] == {'level': 3}, task\n"
        "assert sys.stdin.read() == os.environ['AGENT_R1_PROMPT'] == 'Capital?'\n"
        "os.mkdir('notes')\n"
        "open('notes/plan.txt', 'w').write('x' * 100_000)\n"
        "open('answer.txt', 'w').write('Paris')\n"
        "os.symlink('/etc/passwd', 'link.txt')\n"
        "os.mkfifo('pipe.txt')\n"
    )
    settings = {
        "command": ["python", str(script)],
        "answer": "file",
        "answer_file": "answer.txt",
        "artefacts": ["notes/plan.txt", "link.txt", "pipe.txt", "absent.txt", "../task.json"],
    }
    async with running(**settings) as tool:
        end = await run(tool, attempt())
    assert (end.exit, end.error, end.answer) == ("ok", "", "Paris")
    assert end.artefacts == {"notes/plan.txt": "x" * MAX_OUTPUT_CHARS}


async def test_a_prompt_too_long_for_a_variable_still_comes_on_standard_input():
    count = "import os, sys; print(len(sys.stdin.read()), 'AGENT_R1_PROMPT' in os.environ)"
    async with running(command=python(count), answer="output") as tool:
        end = await run(tool, attempt(prompt="ä" * 200_000))
    assert end.answer == "200000 False"


async def test_the_time_limit_keeps_what_was_printed_and_left():
    code = "import time; print('half', flush=True); open('a', 'w').write('b'); time.sleep(60)"
    async with running(command=python(code), artefacts=["a"]) as tool:
        end = await run(tool, attempt(timeout_s=1.0))
    assert (end.exit, end.output, end.artefacts) == ("timeout", "half", {"a": "b"})
    assert 1.0 <= end.latency_s < 5.0


# --- walls --------------------------------------------------------------------------------------

LOOK = f"""
import os, pathlib, socket
found = []
def attempt(name, what):
    try:
        found.append(f"{{name}}: {{what()!r}}")
    except OSError as exc:
        pass
for path in ("{REPOSITORY}/README.md", "/etc/shadow", "/root/.bashrc", "/proc/1/environ",
             "/proc/1/mem", "BESIDE/answers.jsonl"):
    attempt(path, lambda: open(path, "rb").read())
attempt("listing", lambda: [x for x in os.listdir("{REPOSITORY}") if x != ".venv"] or open("/no"))
for address in (("127.0.0.1", GATEWAY), ("1.1.1.1", 80)):
    attempt(address, lambda: socket.create_connection(address, 2))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
for path in ("/etc/x", "/usr/x", "/x", "/sandbox/x", "/sandbox/agent_r1/x"):
    attempt(path, lambda: open(path, "w"))
attempt("setuid", lambda: os.setuid(0))
attempt("init", lambda: os.kill(1, 9) or open("/no"))
print(found, sorted(key for key in os.environ if "SECRET" in key or key.startswith("AGENT_R1__")))
"""


@pytest.mark.parametrize("form", ["command", "class"])
async def test_an_agent_sees_nothing_but_its_own(
    form: str, classes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_R1__REDIS__URL", "redis://secret")
    monkeypatch.setenv("HUB_SECRET", "hub")
    async with ModelGateway() as gateway:
        code = LOOK.replace("GATEWAY", str(gateway.port)).replace("BESIDE", str(tmp_path))
        kind = {"type": f"{classes}:Runs"} if form == "class" else {"command": python(code)}
        async with running(**kind) as tool:
            end = await run(tool, attempt(gateway.url, prompt=code))
    assert (end.exit, end.output) == ("ok", "[] []")


@pytest.mark.parametrize("form", ["command", "class"])
async def test_attempts_of_one_service_do_not_see_each_other(form: str, classes: str):
    code = """
import os, pathlib, socket, time
def shown():
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pids, *(sorted(os.listdir(path)) for path in ("/tmp", "/tmp/work", "/dev/shm"))]
before = shown()
pathlib.Path("mine").write_text("x")
pathlib.Path("/dev/shm/mine").write_text("x")
server = socket.socket(socket.AF_UNIX)
server.bind("\\0agent")
tcp = socket.create_server(("127.0.0.1", 4321))
time.sleep(2)
print(before)
"""
    kind = {"type": f"{classes}:Runs"} if form == "class" else {"command": python(code)}
    async with running(**kind) as tool:
        ends = await asyncio.gather(
            *(run(tool, attempt(prompt=code), f"r/0/0/{number}/0") for number in range(3))
        )
    assert {(end.exit, end.output) for end in ends} == {
        ("ok", "[[1, 2], ['home', 'task.json', 'work'], [], []]")
    }


async def test_telemetry_is_off_and_variables_of_the_table_are_set():
    code = "import os; print(os.environ['OPENAI_AGENTS_DISABLE_TRACING'], os.environ['MODE'])"
    settings = {"command": python(code), "env": {"MODE": "fast", "OPENAI_BASE_URL": "http://x"}}
    async with running(**settings) as tool:
        assert (await run(tool, attempt())).output == "1 fast"


HOSTILE = {
    "fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "timeout",
    ),
    "memory of one process": ("x = bytearray(10**9)", "failed"),
    "memory of many processes": (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        break\n"
        "x = bytearray(100 << 20)\nx[::4096] = bytes(len(x[::4096]))\ntime.sleep(60)",
        "failed",
    ),
    "endless output": ("while True:\n    print('x' * 1000)", "timeout"),
    "full disk": ("open('x', 'wb').write(bytes(200 << 20))", "failed"),
    "ignoring signals": (
        "import signal, time\n"
        "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "while True:\n    time.sleep(1)",
        "timeout",
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(60)\n    os._exit(0)\nos.wait()",
        "ok",
    ),
    "killing all": ("import os\nos.kill(-1, 9)", "ok"),
}


@pytest.mark.parametrize("form", ["command", "class"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_what_an_agent_does_ends_with_its_attempt(name: str, form: str, classes: str):
    code, exit_ = HOSTILE[name]
    kind = {"type": f"{classes}:Runs"} if form == "class" else {"command": python(code)}
    limits = {"memory_mb": 192, "processes": 16, "file_mb": 64}
    async with running(**kind, **limits) as tool:
        end = await run(tool, attempt(prompt=code, timeout_s=3.0))
        assert end.exit == exit_, end
        assert len(end.output) <= MAX_OUTPUT_CHARS
        await asyncio.wait_for(_until_empty(tool), GONE_TIMEOUT_S)
        again = await run(tool, attempt(prompt="print('well')" if form == "class" else ""))
        assert again.exit in ("ok", exit_)


async def test_closing_ends_a_running_agent_and_all_that_it_started():
    code = "import os, time\nfor _ in range(3):\n    os.fork()\nprint(1, flush=True)\ntime.sleep(60)"
    async with running(command=python(code)) as tool:
        working = asyncio.create_task(call(tool, attempt()))
        async with asyncio.timeout(GONE_TIMEOUT_S):
            while len(tree(tool)) < 2 + 1 + 8:  # bwrap and process 1, a keeper, 2 ** 3 agents
                await asyncio.sleep(0.02)
        await tool.close("r/0/0/0/0")
        with pytest.raises(asyncio.CancelledError):
            await working
        await asyncio.wait_for(_until_empty(tool), GONE_TIMEOUT_S)
