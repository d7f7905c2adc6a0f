"""`agents attach`: the command that it starts for attempts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from agent_r1.cli.services import attach
from agent_r1.cli.services.attach import (
    MAX_REPORT_BYTES,
    Attacher,
    _find_program,
    _find_service,
    _read_file,
    _read_report,
)
from agent_r1.config.sources import ConfigError
from agent_r1_proto.agents import MAX_OUTPUT_CHARS, AttemptReport


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
