"""The service that runs agents, with its real sandbox: ends, walls, attaching, many at once."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.runtime.http.token import RunToken
from agent_r1.sandbox.processes import find_tree
from agent_r1.tools.agents.sandbox import AgentSandbox
from agent_r1.tools.agents.tool import AgentTool
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import ToolUnavailableError
from agent_r1.tools.config import ToolConfig
from agent_r1_proto.agents import AGENTS, MAX_OUTPUT_CHARS, AgentEnd
from tests.support.agent_calls import attempt, call, python, run
from tests.support.fakes import LeavingClient
from tests.support.model_gateway import ModelGateway

REPOSITORY = Path(__file__).resolve().parents[2]
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
ASKING = """
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
"""
CLASSES = """
from agent_r1 import Agent

class Broken(Agent):
    def __init__(self):
        raise RuntimeError("no licence")

    async def run(self, task, model):
        return None

class Runs(Agent):
    async def run(self, task, model):
        scope = {}
        exec(task.prompt[-1].content, scope)
        return scope.get("answer")
"""


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of agents, with a file beside it that no agent may read; returns its name."""
    return write_module(CLASSES, tmp_path, monkeypatch)


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A class that imports an SDK."""
    return f"{write_module(ASKING, tmp_path, monkeypatch)}:Ask"


def write_module(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"agents_{secrets.token_hex(4)}"
    (folder / f"{name}.py").write_text(source)
    (folder / "answers.jsonl").write_text("the answers\n")
    monkeypatch.syspath_prepend(str(folder))
    return name


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[AgentTool]:
    tool = AgentTool(**settings)
    try:
        await tool.start()
    except ValueError as exc:
        if not any(word in str(exc) for word in ("bwrap", "unshare")):
            raise
        pytest.skip(str(exc))
    try:
        yield tool
        await until_empty(tool)
    finally:
        await tool.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the kernel tells nobody."""
    async with asyncio.timeout(GONE_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_empty(tool: AgentTool) -> None:
    """Wait until nothing of an attempt is left."""
    own = 1 if tool.settings.sandbox == "container" else 2  # bwrap and process 1
    await until(lambda: len(tree(tool)) == own)


def sandbox_of(tool: AgentTool) -> AgentSandbox:
    assert isinstance(tool._runner, AgentSandbox)
    return tool._runner


def tree(tool: AgentTool) -> list[int]:
    """Return the processes of a sandbox; first those that are there without an attempt."""
    process = sandbox_of(tool).process
    assert process is not None
    return find_tree(process)


# --- ends ---------------------------------------------------------------------------------------


async def test_a_program_asks_the_gateway_with_an_unmodified_sdk():
    async with ModelGateway() as gateway, running(command=python(ASK), answer="output") as tool:
        end = await run(tool, attempt(gateway.url))
    assert (end.exit, end.answer, end.error) == ("ok", "Paris", "")
    (request,) = gateway.requests
    assert request["messages"] == [{"role": "user", "content": "Capital?"}]
    assert end.latency_s > 0


async def test_a_class_asks_the_gateway_and_returns_its_answer(asking: str):
    async with ModelGateway() as gateway, running(type=asking, answer="output") as tool:
        assert tool.spec().version == "7"
        end = await run(tool, attempt(gateway.url))
    assert (end.exit, end.answer, end.output) == ("ok", "Paris", "working on q1 3")


async def test_a_class_that_fails_says_why(classes: str):
    async with running(type=f"{classes}:Runs", answer="output") as tool:
        raised = await run(tool, attempt(prompt="print('so far')\nraise KeyError('no plan')"))
        number = await run(tool, attempt(prompt="answer = 42"))
        gone = await run(tool, attempt(prompt="import os; os._exit(3)"))
        assert (await run(tool, attempt(prompt="answer = 'well'"))).answer == "well"
    assert (raised.exit, raised.error, raised.answer) == ("failed", "KeyError: 'no plan'", None)
    assert raised.output.startswith("so far\nTraceback")
    assert number.error == "TypeError: run returned int; it must return a str or None"
    assert (gone.exit, gone.error) == ("failed", "exit status 3")


async def test_a_class_that_cannot_be_constructed_has_not_started(classes: str):
    async with running(type=f"{classes}:Broken") as tool:
        end = await run(tool, attempt())
    assert (end.exit, end.error) == (
        "not_started",
        "Broken() raised RuntimeError: no licence; correct the class",
    )


async def test_a_class_that_cannot_be_imported_in_the_sandbox_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = f"import os\nos.stat({str(tmp_path / 'answers.jsonl')!r})\n{CLASSES}"
    name = write_module(source, tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"FileNotFoundError.*answers\.jsonl.*agent\.show"):
        await AgentTool(type=f"{name}:Runs").start()


async def test_a_program_that_fails_says_why():
    async with running(command=["sh", "-c", 'eval "$AGENT_R1_PROMPT"']) as tool:
        status = await run(tool, attempt(prompt="exit 3"))
        said = await run(tool, attempt(prompt="echo first >&2; echo the reason >&2; exit 1"))
        crashed = await run(tool, attempt(prompt="kill -SEGV $$"))
    assert (status.exit, status.error) == ("failed", "exit status 3")
    assert (said.exit, said.error, said.output) == ("failed", "the reason", "first\nthe reason")
    assert (crashed.exit, crashed.error) == ("failed", "ended by SIGSEGV")


@pytest.mark.parametrize(
    "command", [["no-such-program"], ["sh", "-c", 'exec "$0" --now', "no-such-program"]]
)
async def test_a_program_that_is_not_there_is_an_error_at_start(command: list[str]):
    with pytest.raises(ValueError, match=r"agent\.command \(no-such-program\).*agent\.show"):
        async with running(command=command):
            pass


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
for path in ("{REPOSITORY}/README.md", "/etc/shadow", "{Path.home()}/.bashrc", "/proc/1/environ",
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
pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
folders = ("/tmp", "/tmp/home", "/tmp/work", "/dev/shm")
found = [name for path in folders for name in os.listdir(path) if name == "mine"]
for folder in folders:
    pathlib.Path(folder, "mine").write_text("x")
server = socket.socket(socket.AF_UNIX)
server.bind("\\0agent")
tcp = socket.create_server(("127.0.0.1", 4321))
time.sleep(1)  # until all have looked
print(pids, found)
"""
    kind = {"type": f"{classes}:Runs"} if form == "class" else {"command": python(code)}
    async with running(**kind) as tool:
        ends = await asyncio.gather(
            *(run(tool, attempt(prompt=code), f"r/0/0/{number}/0") for number in range(3))
        )
    assert {(end.exit, end.output) for end in ends} == {("ok", "[1, 2] []")}


async def test_both_sdks_find_the_model_in_their_variables():
    code = """
import os
print(os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"])
for name in ("API_KEY", "MODEL"):
    print(os.environ["ANTHROPIC_" + name] == os.environ["OPENAI_" + name] != "")
"""
    async with running(command=python(code)) as tool:
        assert (await run(tool, attempt())).output.split() == ["True"] * 3


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
    "killing all": ("import os\ntry:\n    os.kill(-1, 9)\nexcept OSError:\n    pass", "ok"),
    "a stopped keeper": ("import os, time\nos.kill(1, 19)\ntime.sleep(60)", "timeout"),
    "nonsense for the keeper": (
        "import os\ntry:\n    os.write(3, b'[' * 100_000)\nexcept OSError:\n    pass\nos._exit(0)",
        "ok",
    ),
}


@pytest.mark.parametrize("form", ["command", "class"])
async def test_what_agents_do_ends_with_their_attempts(form: str, classes: str):
    run_prompt = python("import sys; exec(sys.stdin.read(), {})")
    kind = {"type": f"{classes}:Runs"} if form == "class" else {"command": run_prompt}
    limits = {"memory_mb": 192, "processes": 16, "file_mb": 64}
    async with running(**kind, **limits) as tool:
        contexts = {
            name: attempt(prompt=code, timeout_s=6.0) for name, (code, _) in HOSTILE.items()
        }
        ends = await asyncio.gather(*(run(tool, contexts[name], f"r/{name}") for name in contexts))
        exits = {name: end.exit for name, end in zip(contexts, ends, strict=True)}
        assert exits == {name: exit_ for name, (_, exit_) in HOSTILE.items()}, ends
        assert max(len(end.output) for end in ends) <= MAX_OUTPUT_CHARS
        await until_empty(tool)
        assert (await run(tool, attempt(prompt="print('well')"))).output == "well"


async def test_closing_ends_a_running_agent_and_all_that_it_started():
    code = (
        "import os, time\nfor _ in range(3):\n    os.fork()\nprint(1, flush=True)\ntime.sleep(60)"
    )
    async with running(command=python(code)) as tool:
        working = asyncio.create_task(call(tool, attempt()))
        # bwrap and process 1, a keeper, 2 ** 3 agents
        await until(lambda: len(tree(tool)) == 2 + 1 + 8)
        await tool.close("r/0/0/0/0")
        with pytest.raises(asyncio.CancelledError):
            await working
        await until_empty(tool)


# --- gateways that come and go ------------------------------------------------------------------

ASK_TWICE = """
import os, openai
client = openai.OpenAI(max_retries=1)
for question in ("first", "second"):
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}]
    )
    print(answer.choices[0].message.content)
"""


async def test_another_gateway_takes_an_agent_over_in_the_middle_of_its_request():
    async with (
        ModelGateway("one", holds_from=1) as first,
        ModelGateway("two") as second,
        running(command=python(ASK_TWICE), answer="output") as tool,
    ):
        lost = asyncio.create_task(call(tool, attempt(first.url)))
        await asyncio.wait_for(first.holds.wait(), GONE_TIMEOUT_S)
        lost.cancel()
        end = await run(tool, attempt(second.url))
    assert (end.exit, end.answer) == ("ok", "one\ntwo")
    assert [one["messages"][0]["content"] for one in second.requests] == ["second"]


async def test_requests_wait_while_no_gateway_answers():
    async with (
        ModelGateway("late") as gateway,
        running(command=python(ASK), answer="output") as tool,
    ):
        waiting = asyncio.create_task(call(tool, attempt()))
        await until(lambda: connections(tool) > 0)
        end = await run(tool, attempt(gateway.url))
        assert (await waiting).answer == end.answer == "late"


def connections(tool: AgentTool) -> int:
    relays = [running._relay for running in tool._running.values()]
    return sum(len(relay._open) for relay in relays if relay is not None)


async def test_an_agent_that_has_ended_keeps_its_end_until_it_is_closed():
    async with running(command=python("import os; print(os.urandom(8))"), answer="output") as tool:
        first = await call(tool, attempt())
        assert await call(tool, attempt()) == first
        await tool.close("r/0/0/0/0")
        assert (await run(tool, attempt())).answer != first.answer


async def test_an_agent_may_open_no_more_connections_than_the_relay_carries():
    code = """
        import os, socket, urllib.parse
        port = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]).port
        some = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
        for one in some:
            one.settimeout(1)
        closed = 0
        for one in some[64:]:
            try:
                closed += one.recv(1) == b""
            except ConnectionError:
                closed += 1
        print(closed)
    """
    async with ModelGateway() as gateway, running(command=python(code), answer="output") as tool:
        assert (await run(tool, attempt(gateway.url))).answer == "16"


# --- as a service -------------------------------------------------------------------------------


@asynccontextmanager
async def serving(config: ToolConfig | None = None, **settings: Any) -> AsyncIterator[Any]:
    """Run the web application of an agent; yields it."""
    tool = AgentTool(**settings)
    app = create_app(ToolService(tool, instance="here-1", config=config or ToolConfig()))
    async with app.router.lifespan_context(app):
        yield app


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agents")


def call_body(context: Any, rollout_id: str = "r/0/0/0/0", timeout_s: float = 60.0) -> Any:
    one = {"name": "agents", "arguments": {}, "rollout_id": rollout_id, "turn": 0}
    return {"calls": [one | {"tool_context": context, "timeout_s": timeout_s}]}


async def test_a_broken_connection_leaves_the_agent_to_the_next_call():
    async with (
        ModelGateway("Paris", holds_from=0) as gateway,
        ModelGateway("Rome") as second,
        serving(command=python(ASK), answer="output") as app,
        client_of(app) as client,
    ):
        session = {"rollout_id": "r/0/0/0/0", "tool_context": attempt(gateway.url)}
        assert (await client.post("/open", json=session)).status_code == 200
        leaving = LeavingClient(app)
        lost = asyncio.create_task(leaving.post("/call", call_body(attempt(gateway.url))))
        await asyncio.wait_for(gateway.holds.wait(), GONE_TIMEOUT_S)
        leaving.leave()
        await asyncio.wait_for(lost, GONE_TIMEOUT_S)
        answered = await client.post("/call", json=call_body(attempt(second.url)))
        assert answered.status_code == 200, answered.text
        end = AgentEnd.model_validate(answered.json()["results"][0]["data"])
        assert (end.exit, end.answer) == ("ok", "Rome")
        assert (await client.post("/close", json={"rollout_id": "r/0/0/0/0"})).status_code == 200
        assert (await client.post("/call", json=call_body(attempt()))).status_code == 409


async def test_an_agent_that_nobody_asks_for_is_ended():
    sleep = python("import time; time.sleep(60)")
    config = ToolConfig(session_expiry_s=0.2)
    async with serving(config, command=sleep) as app, client_of(app) as client:
        await client.post("/open", json={"rollout_id": "r/0/0/0/0"})
        answer = await client.post("/call", json=call_body(attempt(), timeout_s=0.3))
        assert answer.status_code == 504
        await until_empty(app.state.service.tool)


async def test_a_service_that_drains_lets_agents_end():
    code = "import time; time.sleep(1); print('done')"
    async with (
        serving(command=python(code), answer="output") as app,
        client_of(app) as client,
    ):
        await client.post("/open", json={"rollout_id": "r/0/0/0/0"})
        working = asyncio.create_task(client.post("/call", json=call_body(attempt())))
        draining = asyncio.create_task(app.state.service.drain(30.0))
        answer = await working
        assert answer.json()["results"][0]["data"]["answer"] == "done"
        assert (await client.post("/open", json={"rollout_id": "r/0/0/1/0"})).status_code == 503
        assert not draining.done()
        await client.post("/close", json={"rollout_id": "r/0/0/0/0"})
        await asyncio.wait_for(draining, GONE_TIMEOUT_S)


async def test_a_wrong_context_and_a_lost_sandbox_are_outages():
    code = (
        "import os; print(os.environ['AGENT_R1_PROMPT'] == 'stay' and __import__('time').sleep(60))"
    )
    async with running(command=python(code), answer="output") as tool:
        with pytest.raises(ToolUnavailableError, match=r"no AgentAttempt.*timeout_s"):
            await call(tool, {"task": {}})
        working = asyncio.create_task(call(tool, attempt(prompt="stay")))
        await until(lambda: len(tree(tool)) == 2 + 2)
        await until(lambda: tool._running["r/0/0/0/0"]._relay is not None)  # it has begun
        sandbox = sandbox_of(tool)._worker
        assert sandbox is not None
        os.kill(tree(tool)[1], signal.SIGKILL)
        await asyncio.wait_for(sandbox.process.wait(), GONE_TIMEOUT_S)
        with pytest.raises(ToolUnavailableError, match="the sandbox of the agents ended"):
            await working
        await tool.close("r/0/0/0/0")
        assert (await run(tool, attempt())).answer == "False"


async def test_fifty_agents_work_at_once(classes: str):
    code = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"]}).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
    async with ModelGateway() as gateway, running(type=f"{classes}:Runs", answer="output") as tool:
        ends = await asyncio.gather(
            *(run(tool, attempt(gateway.url, prompt=code), f"r/0/0/{n}/0") for n in range(50))
        )
    assert {(end.exit, end.answer, end.error) for end in ends} == {("ok", "Paris", "")}
    assert len(gateway.requests) == 50


# --- without namespaces -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["command", "class"])
async def test_in_a_container_agents_end_with_their_attempts_too(form: str, classes: str):
    if os.geteuid() == 0:
        pytest.skip("the sandbox's user cannot read root's files, which are shown to it elsewhere")
    run_prompt = python("import sys; exec(sys.stdin.read(), {})")
    kind = {"type": f"{classes}:Runs"} if form == "class" else {"command": run_prompt}
    async with running(**kind, sandbox="container", network=True) as tool:
        worker = sandbox_of(tool)._worker
        assert worker is not None
        folder = worker.folder
        code = "import os; print(sorted(os.listdir('..')), 'HUB' in os.environ, flush=True)"
        end = await run(tool, attempt(prompt=f"{code}\n{HOSTILE['daemon'][0]}", timeout_s=5.0))
        assert (end.exit, end.output) == ("ok", "['home', 'task.json', 'work'] False")
        assert os.listdir(folder) == ["sandbox"]


async def test_a_machine_with_a_token_of_its_own_serves_agents_and_knows_nothing_of_a_run(
    tmp_path: Path,
):
    run_token, own_token = secrets.token_hex(16), secrets.token_hex(16)
    (tmp_path / "own.token").write_text(own_token)
    (tmp_path / "agent.toml").write_text(f"""
[model]
path = "none"
[agent]
command = ["true"]
token_file = "{tmp_path / "own.token"}"
service = {{host = "0.0.0.0", advertise_host = "127.0.0.1"}}
""")
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    serving = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent_r1.cli.main", "serve", "agents", "agent.toml"),
        cwd=tmp_path,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert serving.stdout is not None
        line = (await asyncio.wait_for(serving.stdout.readline(), 60)).decode()
        assert "(agent.url)" in line
        url = line.partition(" serves at ")[2].partition(",")[0]
        for own in ({}, {AGENTS: RunToken(own_token)}):
            client = ToolClient({AGENTS: url}, token=RunToken(run_token), own_tokens=own)
            try:
                if not own:
                    with pytest.raises(ValueError, match="refuses this run"):
                        await client.start(30)
                    continue
                await client.start(30)
                await client.open_session(AGENTS, "one", None)
                call = await client.call(
                    AGENTS, {}, rollout_id="one", turn=0, tool_context=attempt(), timeout_s=30
                )
                assert AgentEnd.model_validate(call.result.data).exit == "ok"
            finally:
                await client.stop()
    finally:
        serving.terminate()
        await asyncio.wait_for(serving.wait(), 30)
