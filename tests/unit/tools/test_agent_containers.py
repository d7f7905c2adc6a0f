"""Agents in containers, against engines that are fakes with the same HTTP API.

tests/integration/test_agent_containers.py has the real ones.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import certifi
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from agent_r1.runtime.agent_settings import AgentSettings
from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import advertised_url, bind, serving
from agent_r1.sandbox.worker import SandboxStartError
from agent_r1.tools.agents import kubernetes
from agent_r1.tools.agents.containers import (
    HOST,
    PROCESS,
    UNTIL,
    ContainerRunner,
    host_name,
    is_orphan,
    make_container,
    make_engine,
    read_report,
)
from agent_r1.tools.agents.docker import NETWORK
from agent_r1.tools.agents.ending import describe_end
from agent_r1.tools.agents.engine import Ended, EngineError
from agent_r1.tools.agents.kubernetes import read_pod
from agent_r1.tools.agents.tool import AgentTool
from agent_r1_proto.agents import MAX_OUTPUT_CHARS

HERE = ListenConfig()
SETTINGS: dict[str, Any] = {"runner": "container", "image": "mine:1", "command": ["solve", "-v"]}
ORDER = {
    "command": ["solve", "-v"],
    "task": {"id": "q"},
    "prompt": "Capital?",
    "key": "key-of-the-session",
    "model": "policy",
    "context": 4096,
    "path": "/sessions/s1/v1",
    "timeout_s": 20.0,
}
REPORT = b"\nagent-r1-report 0 -\n"
WAIT_S = 2.0
FINISHED = "2026-01-02T03:04:05.678901234Z"


def make_settings(**more: Any) -> AgentSettings:
    return AgentSettings.model_validate(SETTINGS | more)


class FakeDocker:
    """Docker's API, of which a container ends at once."""

    def __init__(self) -> None:
        self.images = ["mine:1"]
        self.networks: dict[str, Any] = {}
        self.containers: dict[str, Any] = {}
        self.output, self.errors = REPORT, b""
        self.end = {"StatusCode": 0, "OOMKilled": False, "FinishedAt": FINISHED}
        self.signals: list[str] = []
        """Events of signals to the last container."""
        self.runs_on = False
        self.fails: str | None = None
        """Path of requests that fail."""
        self.asked = asyncio.Event()
        """Set once a container is asked for."""
        self.may_create = asyncio.Event()
        self.may_create.set()
        self.app = FastAPI()
        self._add_machine(self.app)
        self._add_containers(self.app)

    def _add_machine(self, app: FastAPI) -> None:
        @app.middleware("http")
        async def fail(request: Request, answer: Callable[..., Any]) -> Response:
            if self.fails is not None and re.search(self.fails, request.url.path):
                return Response(json.dumps({"message": "disk is full"}), 500)
            return await answer(request)

        @app.get("/images/{name:path}/json")
        async def image(name: str) -> Response:
            return Response("{}", 200 if name in self.images else 404)

        @app.get("/networks/{name}")
        async def network(name: str) -> Response:
            found = self.networks.get(name)
            return Response(json.dumps(found), 404 if found is None else 200)

        @app.post("/networks/create")
        async def make(request: Request) -> Response:
            body = await request.json()
            gateway = {"Config": [{"Gateway": "127.0.0.1"}]}
            self.networks[body["Name"]] = {**body, "IPAM": gateway}
            return Response("{}", 201)

    def _add_containers(self, app: FastAPI) -> None:
        @app.post("/containers/create")
        async def create(request: Request, name: str) -> Response:
            self.asked.set()
            await self.may_create.wait()
            self.containers[name] = await request.json()
            return Response("{}", 201)

        @app.post("/containers/{name}/start")
        async def start(name: str) -> Response:
            return Response(status_code=204)

        @app.post("/containers/{name}/wait")
        async def wait(name: str) -> Response:
            if self.runs_on:
                await asyncio.sleep(WAIT_S)
            return Response(json.dumps(self.end))

        @app.get("/containers/json")
        async def listed() -> Response:
            found = [{"Labels": one["Labels"]} for one in self.containers.values()]
            return Response(json.dumps(found))

        @app.get("/containers/{name}/json")
        async def inspect(name: str) -> Response:
            return Response(json.dumps({"State": self.end}))

        @app.get("/events")
        async def events(since: int, until: int, filters: str) -> Response:
            (name,) = self.containers
            assert json.loads(filters) == {"container": [name], "event": ["kill"]}
            # The answer ends at `until`; what was said at the end is in it.
            assert since < datetime.fromisoformat(FINISHED[:19] + "+00:00").timestamp() < until
            return Response("\n".join(self.signals))

        @app.get("/containers/{name}/logs")
        async def logs(name: str) -> Response:
            frames = b"".join(
                struct.pack(">BxxxI", kind, 1) + data[at : at + 1]
                for kind, data in ((1, self.output), (2, self.errors))
                for at in range(len(data))
            )

            async def pieces() -> AsyncIterator[bytes]:
                for at in range(0, len(frames), 5):  # a header comes in parts
                    yield frames[at : at + 5]

            return StreamingResponse(pieces())

        @app.delete("/containers/{name}")
        async def remove(name: str, force: int, v: int) -> Response:
            return Response(status_code=204 if self.containers.pop(name, None) else 404)


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    listener = bind("engine", HERE, None)
    async with serving(app, listener, HERE, None):
        yield advertised_url("engine", HERE, listener.getsockname()[1])
    listener.close()


@asynccontextmanager
async def started(fake: FakeDocker, **settings: Any) -> AsyncIterator[ContainerRunner]:
    async with served(fake.app) as url:
        runner = ContainerRunner(make_settings(engine=url, **settings))
        await runner.start()
        yield runner
        await runner.stop()


async def make_attempt(runner: ContainerRunner, **order: Any) -> dict[str, Any]:
    attempt = await runner.begin(ORDER | order)
    try:
        return await attempt.report()
    finally:
        await attempt.end()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"runner": "container", "command": ["c"]}, "set image (None) and command (['c'])"),
        ({"runner": "kubernetes", "image": "i", "type": "a:B"}, "and leave out type, attached"),
        ({"runner": "container", "image": "i", "attached": True}, "and leave out type, attached"),
        (
            {"runner": "container", "image": "i", "command": ["c"], "show": ["/etc"]},
            "leave out type, attached, show and sandbox",
        ),
        ({"command": ["c"], "image": "i"}, "image ('i') and engine (None) are for containers"),
        ({"command": ["c"], "engine": "http://e"}, "are for containers: set runner"),
        (SETTINGS | {"engine": "tcp://e"}, "settings.engine: String should match"),
        (SETTINGS | {"cpus": 0}, "settings.cpus"),
        (SETTINGS | {"artefacts": ["a\nb"]}, "settings.artefacts.0"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=re.escape(problem)):
        AgentTool(**settings)


# --- what is asked of Docker --------------------------------------------------------------------


async def test_a_container_has_its_walls_and_no_more_than_its_session(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("HUB_SECRET", "hub")
    fake = FakeDocker()
    async with started(fake, memory_mb=100, file_mb=20, processes=7, cpus=0.5) as runner:
        assert fake.networks[NETWORK]["Internal"] is True
        attempt = await runner.begin(ORDER)
        (made,) = fake.containers.values()
        await attempt.end()
    host = made["HostConfig"]
    assert (made["Image"], made["User"]) == ("mine:1", "65532:65532")
    assert made["Entrypoint"][:2] == ["/bin/sh", "-c"]
    assert made["Entrypoint"][3:] == ["agent", "solve", "-v"]
    assert host["NetworkMode"] == NETWORK
    assert host["ReadonlyRootfs"] is True
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])
    assert host["Memory"] == host["MemorySwap"] == (100 + 20) << 20
    assert (host["NanoCpus"], host["PidsLimit"]) == (500_000_000, 7 + 4)
    assert "size=20m" in host["Tmpfs"]["/tmp"]
    variables = dict(one.split("=", 1) for one in made["Env"])
    address = attempt.listener
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/sessions/s1/v1", variables["OPENAI_BASE_URL"])
    assert address.fileno() == -1  # closed with the attempt
    assert variables["OPENAI_API_KEY"] == "key-of-the-session"
    assert base64.b64decode(variables["AGENT_R1_GIVEN_0"]) == b'{"id": "q"}'
    assert "HUB_SECRET" not in variables
    assert fake.containers == {}


async def test_an_open_network_is_dockers_own():
    fake = FakeDocker()
    fake.networks["bridge"] = {"Internal": False, "IPAM": {"Config": [{"Gateway": "127.0.0.1"}]}}
    async with started(fake, network=True) as runner:
        attempt = await runner.begin(ORDER)
        (made,) = fake.containers.values()
        await attempt.end()
    assert made["HostConfig"]["NetworkMode"] == "bridge"
    assert NETWORK not in fake.networks


async def test_what_is_printed_is_read_apart():
    fake = FakeDocker()
    async with started(fake) as runner:
        fake.output, fake.errors = "Pär\nis\nagent-r1-report 3 -\n".encode(), b"thinking"
        report = await make_attempt(runner)
    assert (report["output"], report["errors"], report["status"]) == ("Pär\nis", "thinking", 3 << 8)


async def test_memory_and_time_are_limits_of_the_agent():
    fake = FakeDocker()
    async with started(fake) as runner:
        fake.output, fake.end = b"so far", fake.end | {"StatusCode": 137, "OOMKilled": True}
        killed = await make_attempt(runner)
        fake.runs_on = True
        late = await make_attempt(runner, timeout_s=-4.9)  # with the grace of 5 s: at once
    assert (killed["why"], killed["output"], late["why"]) == ("memory", "so far", "timeout")
    assert fake.containers == {}


async def test_a_start_says_what_is_wrong():
    fake = FakeDocker()
    fake.images = []
    with pytest.raises(ValueError, match=r"agent\.image \(mine:1\) is not on the machine.*pull"):
        async with started(fake):
            pass
    fake.images = ["mine:1"]
    fake.output = b"\nagent-r1-report 1 -\n"
    with pytest.raises(ValueError, match=r"cannot run agent\.command \(solve\): it is not there"):
        async with started(fake):
            pass
    fake.networks[NETWORK]["Internal"] = False
    with pytest.raises(ValueError, match=r"leads outside.*docker network rm"):
        async with started(fake):
            pass
    assert fake.containers == {}
    nowhere = ContainerRunner(make_settings(engine="unix:///no/such.sock"))
    with pytest.raises(ValueError, match=r"agent\.runner \(container\).*unix:///no/such\.sock"):
        await nowhere.start()


async def test_what_cannot_be_removed_is_removed_later():
    fake = FakeDocker()
    async with started(fake) as runner:
        fake.fails = "/start$"
        with pytest.raises(SandboxStartError, match=r"HTTP 500: .*disk is full"):
            await runner.begin(ORDER)
        assert fake.containers == {}
        fake.fails = None
        attempt = await runner.begin(ORDER)
        fake.fails = "^/containers/agent-r1-[^/]*$"
        await attempt.end()
        assert len(fake.containers) == 1
        fake.fails = None
        await make_attempt(runner)
    assert fake.containers == {}


async def test_an_attempt_that_is_cancelled_while_it_is_created_leaves_nothing():
    fake = FakeDocker()
    async with started(fake) as runner:
        fake.asked.clear()
        fake.may_create.clear()
        beginning = asyncio.create_task(runner.begin(ORDER))
        await fake.asked.wait()
        beginning.cancel()
        fake.may_create.set()
        with pytest.raises(asyncio.CancelledError):
            await beginning
    assert fake.containers == {}


async def test_containers_of_a_dead_service_are_removed_and_those_of_others_are_not():
    mine, other = {HOST: host_name(), PROCESS: "0-1"}, {HOST: "other", PROCESS: "0-1"}
    fake = FakeDocker()
    for name, labels in (("a", mine), ("b", other)):
        fake.containers[name] = {"Labels": {**labels, "agent-r1/attempt": name}}
    async with started(fake):
        assert list(fake.containers) == ["b"]


def test_a_service_that_sees_other_processes_judges_none_of_them():
    labels = {HOST: f"{socket.gethostname()}-1", PROCESS: "0-1"}  # as two containers of one host
    assert not is_orphan(labels)
    assert is_orphan(labels | {UNTIL: "1.0"})


def test_a_log_without_the_report_of_its_script_is_a_loss_and_no_success():
    report = read_report(make_settings(), "ended", 0, b"the end of a report that was rotated", b"")
    assert report == {"lost": "the log of the container has no report"}


def test_a_container_is_an_orphan_once_its_process_or_its_time_is_over():
    (own,) = [make_container(make_settings(), ORDER, ("127.0.0.1", 1), make_docker()).labels]
    assert not is_orphan(own)
    pid, _, began = own[PROCESS].partition("-")
    assert pid == str(os.getpid())
    assert is_orphan({**own, PROCESS: f"{pid}-{int(began) + 1}"})  # another of the same number
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert is_orphan({**own, PROCESS: f"{gone.pid}-5"})
    assert not is_orphan({**own, HOST: "other", PROCESS: f"{gone.pid}-5"})
    assert is_orphan({**own, HOST: "other", UNTIL: str(time.time() - 1)})


def make_docker() -> Any:
    return make_engine(make_settings())


# --- the script and its report ------------------------------------------------------------------


def test_a_task_that_is_too_long_is_refused():
    order = ORDER | {"prompt": "x" * 800_000}  # 4/3 of it in base64
    with pytest.raises(SandboxStartError, match=r"take 10666\d\d bytes.*at most 1000000"):
        make_container(make_settings(), order, ("127.0.0.1", 1), make_docker())


def test_long_tasks_come_in_pieces_that_the_kernel_takes():
    order = ORDER | {"prompt": "ä" * 100_000}
    made = make_container(make_settings(), order, ("127.0.0.1", 1), make_docker())
    pieces = {n: v for n, v in made.environment.items() if n.startswith("AGENT_R1_GIVEN_")}
    assert max(map(len, made.environment.values())) < 128 << 10
    assert base64.b64decode("".join(list(pieces.values())[1:])).decode() == order["prompt"]


@pytest.mark.parametrize("answer", ["output", "message"])
def test_the_script_is_one_whatever_files_are_called(answer: str):
    settings = make_settings(answer=answer, artefacts=["it's $(a).txt", "{{ b }}"])
    script = make_container(settings, ORDER, ("127.0.0.1", 1), make_docker()).command[2]
    subprocess.run(["sh", "-n", "-c", script], check=True)  # reads it, and runs nothing
    assert """'/tmp/work/it'"'"'s $(a).txt' '/tmp/work/{{ b }}'; do""" in script
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-s", "sh", "-"], input=script.encode(), check=True)


def coded(text: str) -> str:
    return f"+{base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("line", "code", "status", "files"),
    [
        (f"0 - {coded('Paris')}", 0, 0, {"a": "Paris"}),
        (f"0 - {coded('')}", 0, 0, {"a": ""}),
        ("0 - -", 0, 0, {}),
        ("3", 0, 3 << 8, {}),
        ("139 - -", 0, signal.SIGSEGV, {}),
        ("200 - -", 0, 200 << 8, {}),  # of no signal
        ("x +!", 9, 9 << 8, {}),  # the agent has written it
        ("", 137, signal.SIGKILL, {}),
    ],
)
def test_the_report_of_the_script_is_read(line: str, code: int, status: int, files: Any):
    settings = make_settings(artefacts=["a"])
    output = f"printed\nagent-r1-report {line}\n" if line else "printed"
    report = read_report(settings, "ended", code, output.encode(), b"")
    assert (report["output"], report["status"], report["files"]) == ("printed", status, files)


def test_ends_are_those_of_any_agent():
    settings = make_settings(answer="output")

    def end(output: str, why: str = "ended") -> tuple[str, str, str | None]:
        found = describe_end(settings, read_report(settings, why, 0, output.encode(), b""))
        return found.exit, found.error, found.answer

    report = "\nagent-r1-report"
    assert end(f"Rome{report} 1\nParis{report} 0 {coded('hm')}") == (
        "ok",
        "",
        "Rome" + report + " 1\nParis",
    )
    assert end(f"Paris{report} 3 {coded('why not')}") == ("failed", "why not", "Paris")
    assert end(f"Paris{report} timeout -")[0] == "timeout"
    assert end("Paris", "memory")[1].startswith("the agent used more than 1024 MB of memory")
    assert end(f"{report} missing")[:2] == (
        "not_started",
        "solve: not found in mine:1; add it to agent.image",
    )
    assert end("x" * 100_000 + f"{report} 0")[2] == "x" * MAX_OUTPUT_CHARS
    lost = describe_end(settings, {"lost": "the pod was deleted"})
    assert (lost.exit, lost.error) == ("lost", "the pod was deleted")


@pytest.mark.parametrize(
    ("output", "code"), [(b"\nagent-r1-report timeout -\n", 0), (b"so far", 137)]
)
async def test_a_container_that_is_stopped_from_outside_is_a_loss(output: bytes, code: int):
    """An agent may end process 1 too: then nobody has sent a signal, and it is the agent's end."""
    fake = FakeDocker()
    async with started(fake) as runner:
        fake.output, fake.end = output, fake.end | {"StatusCode": code}
        by_itself = await make_attempt(runner)
        fake.signals = ['{"Action": "kill"}']
        stopped = await make_attempt(runner)
    assert (by_itself["why"], "lost" in by_itself) == ("ended" if code else "timeout", False)
    assert stopped == {"lost": "the container was stopped from outside"}


# --- what is asked of Kubernetes ----------------------------------------------------------------


class FakeCluster:
    """The API of a cluster, of which a test says what becomes of pods."""

    def __init__(self) -> None:
        self.jobs: dict[str, Any] = {}
        self.pods: list[list[dict[str, Any]]] = []
        """Events of each watch in turn; the last stays open."""
        self.tokens: list[str] = []
        self.output = b"Paris" + REPORT
        self.app = app = FastAPI()
        jobs, pods = (f"/{path}/namespaces/runs" for path in ("apis/batch/v1", "api/v1"))

        @app.middleware("http")
        async def note(request: Request, answer: Callable[..., Any]) -> Response:
            self.tokens.append(request.headers["authorization"])
            return await answer(request)

        @app.post(f"{jobs}/jobs")
        async def create(request: Request) -> Response:
            body = await request.json()
            self.jobs[body["metadata"]["name"]] = body
            return Response("{}", 201)

        @app.get(f"{jobs}/jobs")
        async def listed() -> Response:
            return Response(json.dumps({"items": list(self.jobs.values())}))

        @app.delete(f"{jobs}/jobs/{{name}}")
        async def remove(name: str, propagationPolicy: str) -> Response:
            return Response("{}", 200 if self.jobs.pop(name, None) else 404)

        @app.get(f"{pods}/pods")
        async def watch(labelSelector: str) -> Response:
            events = self.pods.pop(0) if self.pods else None

            async def lines() -> AsyncIterator[bytes]:
                for event in events or []:
                    yield json.dumps(event).encode() + b"\n"
                if events is None:
                    await asyncio.sleep(WAIT_S)

            return StreamingResponse(lines())

        @app.get(f"{pods}/pods/p/log")
        async def log() -> Response:
            return Response(self.output)


def pod(status: dict[str, Any], state: dict[str, Any] | None = None) -> dict[str, Any]:
    statuses = [] if state is None else [{"state": state}]
    return {"metadata": {"name": "p"}, "status": status | {"containerStatuses": statuses}}


def event(status: dict[str, Any], state: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "MODIFIED", "object": pod(status, state)}


PENDING = event({"phase": "Pending", "conditions": [{"reason": "Unschedulable", "message": "0/1"}]})
RUNS = event({"phase": "Running"}, {"running": {}})
ENDED = event({"phase": "Succeeded"}, {"terminated": {"exitCode": 0, "reason": "Completed"}})


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "namespace").write_text("runs\n")
    (tmp_path / "token").write_text("first\n")
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    return tmp_path


@asynccontextmanager
async def in_cluster(fake: FakeCluster, **settings: Any) -> AsyncIterator[ContainerRunner]:
    fake.pods = [[ENDED]]
    async with served(fake.app) as url:
        runner = ContainerRunner(make_settings(runner="kubernetes", engine=url, **settings))
        await runner.start()
        yield runner
        await runner.stop()


async def test_a_job_has_its_walls_and_ends_by_itself(account: Path):
    fake = FakeCluster()
    async with in_cluster(fake, memory_mb=100, file_mb=20, cpus=0.5) as runner:
        attempt = await runner.begin(ORDER | {"prompt": "$(HOME) $x $$"})
        (job,) = fake.jobs.values()
        (account / "token").write_text("second\n")
        await attempt.end()
    assert fake.jobs == {}
    assert (fake.tokens[0], fake.tokens[-1]) == ("Bearer first", "Bearer second")
    spec = job["spec"]["template"]["spec"]
    (agent,) = spec["containers"]
    assert job["spec"]["backoffLimit"] == 0
    assert spec["activeDeadlineSeconds"] == 20 + 5
    assert job["spec"]["activeDeadlineSeconds"] > spec["activeDeadlineSeconds"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # or the addresses of the run are in its variables
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "20Mi"}
    assert agent["resources"]["limits"] == {"cpu": "0.5", "memory": "120Mi"}
    assert agent["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert labels["agent-r1/network"] == "closed"
    values = {one["name"]: one["value"] for one in agent["env"]}
    assert values["AGENT_R1_PROMPT"] == "$$(HOME) $$x $$$$"  # Kubernetes makes one of two


async def test_a_watch_that_ends_is_begun_again(account: Path):
    fake = FakeCluster()
    async with in_cluster(fake, answer="output") as runner:
        fake.pods = [[PENDING], [], [RUNS, {"type": "ERROR", "object": {"code": 410}}], [ENDED]]
        report = await make_attempt(runner)
    assert (report["why"], report["status"], report["output"]) == ("ended", 0, "Paris")


async def test_a_pod_that_is_deleted_or_has_no_place_is_no_fault_of_the_agent(account: Path):
    fake = FakeCluster()
    async with in_cluster(fake) as runner:
        deleted = copy.deepcopy(ENDED)
        deleted["object"]["metadata"]["deletionTimestamp"] = FINISHED
        paris, fake.output = fake.output, b"\nagent-r1-report timeout -\n"
        fake.pods = [[RUNS, deleted]]
        assert await make_attempt(runner) == {"lost": "the container was stopped from outside"}
        fake.output = paris
        fake.pods = [[RUNS, {**RUNS, "type": "DELETED"}]]
        deleted = await make_attempt(runner)
        fake.pods = [[PENDING]]
        pending = await make_attempt(runner, timeout_s=-4.0)  # with the grace of 5 s: 1 s
        fake.pods = [[RUNS]]
        late = await make_attempt(runner, timeout_s=-4.0)
    assert "was deleted" in deleted["lost"]
    assert re.search(r"did not start in its time: Unschedulable 0/1", pending["lost"])
    assert (late["why"], late["output"]) == ("timeout", "Paris")


@pytest.mark.parametrize(
    ("status", "state", "expected"),
    [
        ({"phase": "Pending"}, None, None),
        ({"phase": "Pending"}, {"waiting": {"reason": "ContainerCreating"}}, None),
        ({"phase": "Running"}, {"running": {}}, None),
        ({"phase": "Failed"}, {"terminated": {"exitCode": 3}}, Ended("ended", 3)),
        (
            {"phase": "Failed"},
            {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            Ended("memory", 137),
        ),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, None, Ended("timeout")),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, None, "Evicted disk"),
        (
            {"phase": "Failed", "reason": "NodeShutdown"},
            {"terminated": {"exitCode": 137}},
            "NodeShutdown",
        ),
        (
            {"phase": "Pending"},
            {"waiting": {"reason": "ErrImagePull", "message": "no such image"}},
            "ErrImagePull no such image",
        ),
    ],
)
def test_a_pod_is_read(status: dict[str, Any], state: dict[str, Any] | None, expected: Any):
    if isinstance(expected, str):
        with pytest.raises(EngineError, match=expected):
            read_pod(pod(status, state))
    else:
        assert read_pod(pod(status, state)) == expected


async def test_a_machine_outside_of_a_cluster_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    runner = ContainerRunner(make_settings(runner="kubernetes"))
    with pytest.raises(ValueError, match=r"has no service account.*agent-jobs\.yaml"):
        await runner.start()
