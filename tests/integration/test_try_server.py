"""`agent-r1 try --policy openai:URL`: a server writes the turns; tool and reward are real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from agent_r1.cli.main import main
from tests.support.starter import write_starter

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]


class ChatServer(ThreadingHTTPServer):
    """An OpenAI chat API whose model looks up "Jade Journey" once, and then answers."""

    seen: list[dict[str, Any]]
    answers: list[str]
    """What is answered in the end, one for each dialogue."""


class Handler(BaseHTTPRequestHandler):
    @property
    def chat(self) -> ChatServer:
        assert isinstance(self.server, ChatServer)
        return self.server

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._send({"data": [{"id": "strong-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/v1/chat/completions"
        self.chat.seen.append({**body, "key": self.headers["authorization"]})
        if body["messages"][-1]["role"] == "tool":
            answer = self.chat.answers.pop()
            message: dict[str, Any] = {
                "content": f"<think>I know.</think><answer>{answer}</answer>"
            }
        else:
            function = {"name": "search", "arguments": '{"query": "Jade Journey"}'}
            call = {"id": "call-1", "type": "function", "function": function}
            message = {"content": None, "tool_calls": [call]}
        self._send({"choices": [{"message": {"role": "assistant", **message}}]})

    def _send(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ChatServer]:
    found = ChatServer(("127.0.0.1", 0), Handler)
    found.seen, found.answers = [], ["Lorwyn Plovum", "nowhere"]
    thread = Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_starter(tmp_path, monkeypatch)
    # The first task's answer is "Lorwyn Plovum".
    first = (folder / "data" / "train.jsonl").read_text().splitlines()[0]
    (folder / "data" / "train.jsonl").write_text(first + "\n")
    return folder / "run.toml"


def test_a_server_writes_the_turns_and_the_real_tool_and_reward_answer(
    config: Path,
    server: ChatServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    url = f"openai:http://127.0.0.1:{server.server_port}/v1"
    code = main(["try", str(config), "-n", "1", "--samples", "2", "--policy", url])
    text = " ".join(capsys.readouterr().out.split())
    assert code == 0, text
    assert '[search {"query": "Jade Journey"}, ok, version 1' in text
    assert "Jade Journey was published in 1910" in text  # what the tool has of it
    assert "task:correct 1" in text
    assert any(f"rewards of train-01: {both}" in text for both in ("0 1", "1 0"))
    assert "secret" not in text
    last = server.seen[-1]
    assert (last["model"], last["key"]) == ("strong-model", "Bearer secret")
    assert [m["role"] for m in last["messages"]] == ["user", "assistant", "tool"]
    assert last["messages"][2]["tool_call_id"] == "call-1"
    assert last["tools"][0]["function"]["name"] == "search"


def test_a_server_that_is_not_there_is_named(
    config: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
):
    server.server_close()
    url = f"openai:http://127.0.0.1:{server.server_port}/v1"
    assert main(["try", str(config), "-n", "1", "--policy", url]) == 2
    assert f"127.0.0.1:{server.server_port}/v1/models does not list a model" in (
        capsys.readouterr().err
    )


def test_what_is_no_address_is_refused(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["try", str(config), "-n", "1", "--policy", "openai:localhost"]) == 2
    assert "must name the base URL of a server" in capsys.readouterr().err
