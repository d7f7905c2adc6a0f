"""`agents attach`: the command that it starts for attempts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.cli.services import attach
from agent_r1.cli.services.attach import (
    MAX_REPORT_BYTES,
    Attacher,
    _end,
    _find_program,
    _find_service,
    _read_file,
    _read_report,
)
from agent_r1.config.sources import ConfigError
from agent_r1_proto.agents import (
    MAX_OUTPUT_CHARS,
    AgentAttempt,
    AgentTask,
    AttemptReport,
    OpenAttempt,
)
from agent_r1_proto.tasks import ChatMessage

NOWHERE = "http://127.0.0.1:9"
WAIT_S = 30.0


def test_files_of_a_command_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "examples").mkdir()
    script = tmp_path / "examples" / "attach.sh"
    script.write_text("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="make the file executable"):
        _find_program(["examples/attach.sh"])
    script.chmod(0o700)
    command = ["examples/attach.sh", "examples/attach.sh", "--model", "a/b"]
    assert _find_program(command) == [str(script), str(script), "--model", "a/b"]
    with pytest.raises(ConfigError, match=r"COMMAND \(no-such-program\)"):
        _find_program(["no-such-program"])


@pytest.mark.parametrize("status", [413, 422])
async def test_a_report_that_is_refused_is_told_as_a_failure_once(status: int):
    told: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        told.append(json.loads(request.content))
        return httpx.Response(status, text="too long")

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url="http://service", transport=transport) as client:
        await Attacher(client, ["true"])._report("a.1", AttemptReport(reward=1.0))
    assert [one.get("exit") for one in told] == [None, "failed"]
    assert "too long" in told[1]["error"]


@pytest.mark.parametrize("name", ["http://", "http://[bad", "https://host:99999"])
def test_an_address_that_is_none_is_refused(name: str):
    with pytest.raises(ConfigError, match="is no address of a service"):
        _find_service(name)


@pytest.mark.parametrize(
    ("report", "answers"),
    [
        (AttemptReport(reward=1.0), [None, 503, 429, 200]),
        (AttemptReport(reward=1.0), [None, 410]),  # it had arrived
        (AttemptReport(exit="given_back"), [None]),  # nobody waits for the end of a Ctrl-C
    ],
)
async def test_what_came_of_an_attempt_is_sent_until_it_arrives(
    report: AttemptReport, answers: list[int | None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attach, "RETRY_S", 0.0)
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        status = left.pop(0)
        if status is None:
            raise httpx.ReadError("broken")
        return httpx.Response(status)

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url="http://service", transport=transport) as client:
        await Attacher(client, ["true"])._report("a.1", report)
    assert left == []


def test_a_long_answer_is_cut_and_keeps_its_reward():
    report = _read_report(json.dumps({"answer": "x" * (MAX_OUTPUT_CHARS + 1), "reward": 1}))
    assert (len(report.answer or ""), report.reward) == (MAX_OUTPUT_CHARS, 1.0)


def test_long_artefacts_are_cut_and_keep_the_reward():
    report = _read_report(json.dumps({"artefacts": {"a": "x" * 9_000_000}, "reward": 0.5}))
    assert (len(report.artefacts["a"]), report.reward) == (MAX_OUTPUT_CHARS, 0.5)


def test_only_an_ordinary_file_of_its_size_is_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no ordinary file"):
        _read_file(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"x" * (MAX_REPORT_BYTES + 1))
    with pytest.raises(OSError, match="has more than"):
        _read_file(tmp_path / "long")
    (tmp_path / "text").write_bytes(b"\xff!")
    assert _read_file(tmp_path / "text") == "\ufffd!"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "valid dictionary"),
        ("no", "Expecting value"),
        ('{"exit": "given_back"}', "'exit' is not told there; answer, reward, artefacts are"),
        ('{"reward": "much"}', "reward"),
        ('{"answer": 3}', "answer"),
        ('{"reward": true}', "reward"),
        ('{"reward": "1"}', "reward"),
        ('{"artefacts": {"a": "\\ud800"}}', "surrogate"),
    ],
)
def test_a_report_that_is_none_says_why(text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        _read_report(text)


class Service:
    """The service that hands attempts out, when it is asked about one."""

    def __init__(self, url: str = NOWHERE, *, is_over: bool = False) -> None:
        self.url = url
        """Of the session, as it is told to a program that asks."""
        self.is_over = is_over
        self.reports: list[AttemptReport] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.reports.append(AttemptReport.model_validate_json(request.content))
            return httpx.Response(200, json=None)
        given = attempt_at(self.url).model_dump(mode="json")
        return httpx.Response(410) if self.is_over else httpx.Response(200, json=given)

    async def let(self, *program: str) -> AttemptReport:
        """Let a program work on an attempt, and return what is reported of it."""
        transport = httpx.MockTransport(self.answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            async with asyncio.timeout(WAIT_S):
                await Attacher(client, program)._work(attempt_at(NOWHERE))
        (report,) = self.reports
        return report


def attempt_at(url: str) -> OpenAttempt:
    task = AgentTask(id="one", prompt=[ChatMessage(role="user", content="Who?")])
    fields: dict[str, Any] = {"key": "k" * 16, "model": "policy", "context": 4096}
    attempt = AgentAttempt(task=task, url=f"{url}/sessions/one/v1", timeout_s=60.0, **fields)
    return OpenAttempt(id="one.1", attempt=attempt)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and temporary files in a folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(attach, "LOOK_S", 0.01)
    monkeypatch.setattr(attach, "END_S", 0.1)


async def test_a_command_is_ended_once_its_attempt_is_over():
    report = await Service(is_over=True).let("sleep", "600")
    assert (report.exit, report.error) == ("failed", "the attempt was over")


async def test_a_command_goes_on_where_its_session_is():
    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nHere I am.")
        writer.close()

    code = "import os, urllib.request as r; print(r.urlopen(os.environ['OPENAI_BASE_URL']).read())"
    server = await asyncio.start_server(gateway, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        report = await Service(f"http://127.0.0.1:{port}").let(sys.executable, "-c", code)
    assert (report.exit, report.answer) == ("ok", "b'Here I am.'")


async def test_a_command_may_put_anything_in_the_place_of_its_folder():
    report = await Service().let("sh", "-c", 'rm -r "$PWD"; touch "$PWD"')
    assert (report.exit, report.error[:15]) == ("failed", "AGENT_R1_REPORT")


@contextlib.asynccontextmanager
async def started(*program: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a command, which says so."""
    process = await asyncio.create_subprocess_exec(
        *program, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WAIT_S):
            assert await process.stdout.readline() == b"ready\n"
            yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_a_command_is_told_first_and_has_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attach, "END_S", WAIT_S)
    code = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); "
        "print('ready', flush=True); signal.sigwait({15}); print('bye')"
    )
    async with started(sys.executable, "-c", code) as process:
        await _end(process)
        assert process.stdout is not None
        assert await process.stdout.read() == b"bye\n"


@pytest.mark.parametrize(
    "program",
    ["trap '' TERM; echo ready; sleep 600", "(trap '' TERM; echo ready; exec sleep 600) & wait"],
    ids=["itself", "what it started"],
)
async def test_a_command_that_does_not_end_is_killed(program: str):
    async with started("sh", "-c", program) as process:
        await _end(process)
        assert process.stdout is not None
        assert await process.stdout.read() == b""  # nobody is left who might write
