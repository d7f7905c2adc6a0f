"""Agents in real containers: of Docker, and of a cluster, where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_r1.gateway.attempts import session_name
from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.session import SessionRules
from agent_r1.tools.agents import kubernetes
from agent_r1.tools.agents.containers import make_engine
from agent_r1.tools.agents.tool import AgentTool
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import Task
from tests.support.agent_calls import attempt, call, python, run
from tests.support.agent_scene import agent_scene, scene_chat
from tests.support.builders import rollout_task
from tests.support.fakes import FakePolicy
from tests.support.model_gateway import ModelGateway

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[2]
IMAGE = os.environ.get("AGENT_IMAGE", "python:3.11-slim-bookworm")
SOCKET = Path("/var/run/docker.sock")
NAMESPACE = "agent-r1-jobs-test"
RELAY_SLICE = ("endpointslice", "agent-r1-api-relay")
GONE_TIMEOUT_S = 120.0
ASK = """
import json, os, sys, urllib.request
given = json.load(open(os.environ["AGENT_R1_TASK"]))
assert given["metadata"] == {"level": 3}, given
assert given["prompt"][0]["content"] == os.environ["AGENT_R1_PROMPT"] == sys.stdin.read()
assert not [name for name in os.environ if "GIVEN" in name]
messages = [{"role": "user", "content": os.environ["AGENT_R1_PROMPT"]}]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
    {
        "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "content-type": "application/json",
    },
)
print("thinking", file=sys.stderr)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


@dataclass
class Platform:
    """A place for containers, and how a test sees what is there."""

    runner: str
    engine: str | None = None

    async def containers(self) -> list[str]:
        """Return the names of the containers that run, or have run, for agents."""
        engine = make_engine(AgentTool(**settings(self, ["true"])).settings)
        await engine.connect()
        try:
            return list(await engine.find())
        finally:
            await engine.close()

    def pods(self) -> str:
        """Return the pods that are there, ended ones too."""
        if self.runner == "container":
            return ""
        return kubectl("get", "pods", "--selector", kubernetes.LABEL, "--output", "name")


def settings(platform: Platform, command: list[str], **more: Any) -> dict[str, Any]:
    found = {"runner": platform.runner, "image": IMAGE, "command": command, "memory_mb": 128}
    return found | {"engine": platform.engine, "cpus": 0.5} | more


@pytest.fixture(params=["container", "kubernetes"], scope="module")
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    if request.param == "container":
        if not SOCKET.exists() or not shutil.which("docker"):
            pytest.skip("there is no Docker here")
        yield Platform("container")
        return
    if (
        shutil.which("kubectl") is None
        or subprocess.run(["kubectl", "get", "--raw", "/readyz"], capture_output=True).returncode
    ):
        pytest.skip("kubectl reaches no cluster")
    patch = pytest.MonkeyPatch()
    folder = request.getfixturevalue("tmp_path_factory").mktemp("account")
    relay = subprocess.Popen([sys.executable, "-m", "tests.support.api_relay"], cwd=REPOSITORY)
    subprocess.run(["kubectl", "create", "namespace", NAMESPACE], check=True)
    try:
        kubectl(*("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted"))
        kubectl("apply", "--filename", str(REPOSITORY / "deploy" / "k8s" / "agent-jobs.yaml"))
        (folder / "namespace").write_text(NAMESPACE)
        (folder / "token").write_text(kubectl("create", "token", "agent-r1-agents"))
        (folder / "ca.crt").write_text(
            kubectl("get", "configmap", "kube-root-ca.crt", "--output", "jsonpath={.data.ca\\.crt}")
        )
        patch.setattr(kubernetes, "ACCOUNT", folder)
        find = ("--namespace", "default", "--output", "jsonpath={.spec.clusterIP}")
        address = kubectl("get", "service", "kubernetes", *find)
        until_open(address)
        yield Platform("kubernetes", f"https://{address}")
    finally:
        patch.undo()
        relay.kill()
        relay.wait()
        kubectl("delete", "--ignore-not-found", "--namespace", "default", *RELAY_SLICE)
        kubectl("delete", "namespace", NAMESPACE)


def until_open(host: str) -> None:
    """Wait until the relay of a local cluster is where its API server is."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((host, 443), 1).close()
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def kubectl(*words: str) -> str:
    command = ["kubectl", "--namespace", NAMESPACE, *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@asynccontextmanager
async def running(platform: Platform, command: list[str], **more: Any) -> AsyncIterator[AgentTool]:
    tool = AgentTool(**settings(platform, command, **more))
    await tool.start()
    try:
        yield tool
        await until_empty(platform)
    finally:
        await tool.stop()


async def until_empty(platform: Platform) -> None:
    """Wait until nothing of an attempt is left."""
    async with asyncio.timeout(GONE_TIMEOUT_S):
        while await platform.containers() or platform.pods():  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # neither tells


async def until_running(platform: Platform) -> None:
    """Wait until a container of an agent runs its program."""
    async with asyncio.timeout(GONE_TIMEOUT_S):
        while True:
            for name in await platform.containers():
                if "up" in await read_log(platform, name):
                    return
            await asyncio.sleep(0.2)


async def read_log(platform: Platform, name: str) -> str:
    if platform.runner == "container":
        command = ["docker", "logs", name]
    else:
        command = ["kubectl", "--namespace", NAMESPACE, "logs", f"job/{name}"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return (await process.communicate())[0].decode()


async def test_a_program_has_its_task_and_asks_the_gateway(platform: Platform):
    prompt = "a $(HOME) $$ `id` \"q\" 'r' \\n\n ä" + "x" * 70_000  # nothing of it is replaced
    async with (
        ModelGateway() as gateway,
        running(platform, python(ASK), answer="output") as tool,
    ):
        end = await run(tool, attempt(gateway.url, prompt=prompt))
    assert (end.exit, end.error, end.answer) == ("ok", "", "Paris")
    assert end.output == "Paris\nthinking"
    assert [one["messages"][0]["content"] for one in gateway.requests] == [prompt]


async def test_ends_and_files_come_back(platform: Platform):
    code = """
    import os, sys
    sys.stdin.read() == "leave" and sys.exit()
    open("answer.txt", "w").write("Paris")
    os.symlink("/etc/passwd", "link.txt")
    os.mkfifo("pipe.txt")
    os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    print("so far", flush=True)
    exec(os.environ["AGENT_R1_PROMPT"])
    """
    files = ["answer.txt", "link.txt", "pipe.txt", "no such.txt"]
    wanted = {"answer": "file", "answer_file": "answer.txt", "artefacts": files}
    async with running(platform, python(code), **wanted) as tool:
        ends = await asyncio.gather(
            run(tool, attempt(prompt="sys.exit(3)"), "a"),
            run(tool, attempt(prompt="os.kill(os.getpid(), 11)"), "b"),
            run(tool, attempt(prompt="import time; time.sleep(60)", timeout_s=4.0), "c"),
            run(tool, attempt(prompt="leave"), "d"),
        )
    failed, crashed, late, empty = ends
    assert (failed.exit, failed.error, failed.answer) == ("failed", "exit status 3", "Paris")
    assert (failed.output, failed.artefacts) == ("so far", {"answer.txt": "Paris"})
    assert (crashed.exit, crashed.error) == ("failed", "ended by SIGSEGV")
    assert (late.exit, late.output, late.answer) == ("timeout", "so far", "Paris")
    assert (empty.exit, empty.answer, empty.artefacts) == ("ok", None, {})


LOOK = """
import os, pathlib, socket
found = []
def attempt(name, what):
    try:
        found.append(f"{name}: {what()!r}")
    except OSError as exc:
        pass
for path in ("/etc/x", "/usr/x", "/x", "/srv/x", "/var/tmp/x"):
    attempt(path, lambda: open(path, "w"))
for path in ("/etc/shadow", "/var/run/docker.sock", "/var/run/secrets/kubernetes.io"):
    attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
attempt("setuid", lambda: os.setuid(0))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
NETWORK
status = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
print(found, os.getuid(), status["CapEff"].strip(), status["CapBnd"].strip(),
      status["NoNewPrivs"].strip(), status["Seccomp"].strip())
print(sorted(name for name in os.environ if "SECRET" in name or "AGENT_R1__" in name))
"""


async def test_an_agent_has_no_rights_and_no_way_out(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_R1__REDIS__URL", "redis://secret")
    ways = ""
    if platform.runner == "container":  # the clusters of tests enforce no NetworkPolicy
        ways = (
            "for address in (('1.1.1.1', 80), ('127.0.0.11', 2375), ('172.17.0.1', 2375)):\n"
            "    attempt(address, lambda: socket.create_connection(address, 2))"
        )
    async with running(platform, python(LOOK.replace("NETWORK", ways)), answer="output") as tool:
        end = await run(tool, attempt())
    assert (end.error, end.answer) == (
        "",
        f"[] 65532 {0:016x} {0:016x} 1 2\n[]",
    )


async def test_limits_end_an_attempt(platform: Platform):
    prompts = {
        "memory": "found = bytearray(500 << 20)",
        "files": "open('big', 'wb').write(bytes(40 << 20))",
        "cpu": "while True: pass",
    }
    code = "import os, sys; exec(os.environ['AGENT_R1_PROMPT'])"
    more = {"file_mb": 20, "cpu_s": 1.0, "answer": "output"}
    async with running(platform, python(code), **more) as tool:
        ends = {name: await run(tool, attempt(prompt=what)) for name, what in prompts.items()}
    assert {end.exit for end in ends.values()} == {"failed"}
    assert ends["memory"].error.startswith("the agent used more than 128 MB of memory")
    assert ends["cpu"].error.startswith("the agent used more than 1 s of CPU")
    # A cluster counts the folder's limit when it makes the folder, where its kubelet can.
    assert "No space left on device" in ends["files"].error or platform.runner == "kubernetes"


async def test_processes_are_limited(platform: Platform):
    if platform.runner == "kubernetes":
        pytest.skip("a cluster limits the processes of a pod by podPidsLimit of its kubelets")
    code = """
    import subprocess
    held = []
    try:
        for _ in range(100):
            held.append(subprocess.Popen(["sleep", "100"]))
    except OSError:
        print(len(held))
    """
    async with running(platform, python(code), answer="output", processes=10) as tool:
        end = await run(tool, attempt())
    assert end.exit == "ok"
    assert end.answer in ("9", "10")  # 10 and the program, of 10 and the script's 4


async def test_an_attempt_is_killed_with_its_session_and_with_its_service(platform: Platform):
    sleeping = ["sh", "-c", "trap '' TERM; echo up; sleep 1000; sleep 1000"]
    async with running(platform, sleeping) as tool:
        closed = asyncio.create_task(call(tool, attempt()))
        await until_running(platform)
        await tool.close("r/0/0/0/0")
        with pytest.raises(asyncio.CancelledError):
            await closed
        await until_empty(platform)
        left = asyncio.create_task(call(tool, attempt(), "r/0/0/1/0"))
        await until_running(platform)
        await tool.stop()
        with pytest.raises(asyncio.CancelledError):
            await left
        await until_empty(platform)


async def test_the_next_service_removes_what_a_killed_one_left(platform: Platform):
    script = f"""
import asyncio
from pathlib import Path
from tests.integration import test_agent_containers as tests
tests.kubernetes.ACCOUNT = Path({str(kubernetes.ACCOUNT)!r})
async def main():
    platform = tests.Platform({platform.runner!r}, {platform.engine!r})
    tool = tests.AgentTool(**tests.settings(platform, ["sh", "-c", "echo up; sleep 1000"]))
    await tool.start()
    await tests.call(tool, tests.attempt())
asyncio.run(main())
"""
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=REPOSITORY)
    try:
        await until_running(platform)
    finally:
        service.send_signal(signal.SIGKILL)
        await service.wait()
    assert len(await platform.containers()) == 1
    async with running(platform, ["true"]):
        await until_empty(platform)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"image": "agent-r1-no-such-image:1"}, "agent-r1-no-such-image"),
        ({"command": ["no-such-program"]}, r"cannot run agent\.command \(no-such-program\)"),
        (
            {"command": ["sh", "-c", 'exec "$0"', "no-such-program"]},
            r"cannot run agent\.command \(no-such-program\)",
        ),
        ({"engine": "unix:///no/such.sock"}, r"unix:///no/such\.sock"),
    ],
    ids=["image", "program", "program of a script", "engine"],
)
async def test_what_cannot_succeed_stops_the_start(
    platform: Platform, wrong: dict[str, Any], problem: str
):
    if platform.runner == "kubernetes" and "engine" in wrong:
        pytest.skip("its address is no socket")
    tool = AgentTool(**{**settings(platform, ["true"]), **wrong})
    with pytest.raises(ValueError, match=problem):
        await tool.start()
    await until_empty(platform)


@pytest.mark.redis
async def test_an_agent_in_a_container_is_trained_as_it_is(
    platform: Platform, redis_url: str, run_id: str
):
    chat = scene_chat()
    end_id = min(chat._end_of_turn_ids)
    policy = FakePolicy(
        lambda token_ids, number: [*chat.encode("<answer>Ada</answer>"), end_id],
        eos_token_ids=[end_id],
        max_context=32_000,
    )
    config = AgentConfig.model_validate(
        settings(platform, python(ASK), answer="output", timeout_s=60.0)
    )
    rollout = rollout_task(run_id, task=Task(id="q", prompt="Who wrote it?", metadata={"level": 3}))
    rules = SessionRules(run_seed=5, max_context=32_000)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        agent_scene(broker, chat, policy, config, rules=rules) as attempts,
    ):
        trajectory = await attempts.run(rollout)
        assert session_name(rollout) not in attempts._open
        await until_empty(platform)
    assert trajectory.status == "COMPLETED", trajectory.reason
    assert (trajectory.status, trajectory.turns[-1].answer) == ("COMPLETED", "Ada")
    sampled = trajectory.token_ids[trajectory.action_mask]
    assert list(sampled) == [*chat.encode("<answer>Ada</answer>"), end_id]


@pytest.fixture
def engine_socket(tmp_path: Path) -> Path:
    if not SOCKET.exists():
        pytest.skip("there is no Docker here")
    return tmp_path / "engine.sock"


class EngineRelay:
    """Docker behind a socket that may go away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._carrying: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def end(self) -> None:
        self._server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, asking = await asyncio.open_unix_connection(str(SOCKET))
        try:
            await asyncio.gather(self._pump(reader, asking), self._pump(answers, writer))
        finally:
            writer.transport.abort()
            asking.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


async def test_a_docker_that_goes_away_is_no_reward(engine_socket: Path):
    relay = EngineRelay(engine_socket)
    await relay.begin()
    here = Platform("container", f"unix://{engine_socket}")
    tool = AgentTool(**settings(here, ["sh", "-c", "echo up; sleep $AGENT_R1_PROMPT"]))
    await tool.start()
    lost = asyncio.create_task(run(tool, attempt(prompt="1000")))
    await until_running(Platform("container"))
    await relay.end()
    end = await lost
    assert end.exit == "lost"
    assert end.error.startswith(f"POST {here.engine}/containers/")
    refused = await run(tool, attempt(prompt="0"))
    assert refused.exit == "not_started"
    assert "/containers/create" in refused.error
    await relay.begin()
    assert (await run(tool, attempt(prompt="0"))).exit == "ok"
    await until_empty(here)  # also of the container that could not be removed
    await tool.stop()
    await relay.end()
