"""Write what the base model of pi is trained from: a tokenizer, initial weights, demonstrations.

    python examples/tiny_code/pi_base.py --out runs/tiny_code_pi

It starts pi once against a server that only listens, to learn what it tells a model. Each line of
that is one token of this tokenizer, so that the prompt of a small model stays short; the date is
spelled. Demonstrations are those of tiny_code, written for pi's tool `bash`.
"""

import argparse
import json
import os
import random
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from init_model import SIZES
from programmers import DONE
from tokenizer import MARKERS, vocabulary
from transformers import Qwen2Tokenizer

from agent_r1.examples.small_model import (
    MARKUP,
    SHORT_TEMPLATE,
    make_tokenizer,
    write_model,
)
from agent_r1.gateway.config import AgentConfig
from agent_r1.learner.sft.data import Demonstration
from agent_r1.runtime.files.published_data import write_lines
from agent_r1.tools.agents.variables import agent_variables
from agent_r1_proto.tasks import ChatMessage

CALL = '{"name":"bash","arguments":{"command":"cat >f.py <<E\\ndef f(x):'
END = '\\nE\\ncheck f.py"}}'
QUESTION = "Write f(x): "
FOLDER = "/tmp/work"
"""Where an agent works in its sandbox."""
START_S = 60
CONTEXT = 1024


class Listener(BaseHTTPRequestHandler):
    """Keeps what is asked, and refuses it."""

    heard: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        """Keep a request."""
        self.heard.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_error(400)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def instructions() -> str:
    """Return what pi tells a model before the question."""
    agent = AgentConfig.model_validate({"known": "pi"})
    assert agent.command is not None
    server = HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as home:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        told = {
            "HOME": home,
            "PATH": os.environ["PATH"],
            **agent_variables(url, "none", "policy", CONTEXT, "", ""),
        }
        subprocess.run(
            agent.command,
            env={**agent.env, **told},
            cwd=home,
            input=b"hello",
            capture_output=True,
            timeout=START_S,
            check=False,
        )
        server.shutdown()
        if not Listener.heard:
            raise SystemExit("pi has asked nothing; is it on PATH? `make test-agents` installs it")
        return Listener.heard[0]["messages"][0]["content"].replace(home, FOLDER)


def fixed_lines(text: str) -> list[str]:
    """Return the lines of the instructions that are the same on every day."""
    lines = {line for line in text.splitlines() if line and not line.startswith("Current ")}
    return sorted(lines, key=len, reverse=True)


def build_tokenizer(text: str) -> Qwen2Tokenizer:
    """Build the tokenizer of tiny_code with pi's call and pi's lines."""
    words = ["\nCurrent date: ", f"\nCurrent working directory: {FOLDER}", CALL, END, QUESTION]
    entries = [*fixed_lines(text), *words, *MARKUP, *MARKERS, *vocabulary()]
    return make_tokenizer(dict.fromkeys(entries), SHORT_TEMPLATE, 2048)


def on_a_day(text: str, rng: random.Random) -> str:
    """Return the instructions as of another day."""
    before, _, after = text.partition("Current date: ")
    _, _, rest = after.partition("\n")
    day = f"20{rng.randint(20, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    return f"{before}Current date: {day}\n{rest}"


def demonstrations(text: str, file: Path, rng: random.Random) -> Iterator[Demonstration]:
    """Yield the demonstrations of tiny_code as pi shows them."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            first, *rest = Demonstration.model_validate_json(line).messages
            question = ChatMessage(role="user", content=str(first.content).strip())
            system = ChatMessage(role="system", content=on_a_day(text, rng))
            yield Demonstration(messages=[system, question, *map(_rewritten, rest)])


def _rewritten(message: ChatMessage) -> ChatMessage:
    if message.role != "assistant" or message.content == DONE:
        return message
    call = json.loads(str(message.content).removeprefix("<tool_call>").removesuffix("</tool_call>"))
    command = f"cat >f.py <<E\n{call['arguments']['code']}\nE\ncheck f.py"
    told = {"name": "bash", "arguments": {"command": command}}
    text = f"<tool_call>{json.dumps(told, separators=(',', ':'))}</tool_call>"
    return message.model_copy(update={"content": text})


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out: Path = parser.parse_args().out
    text = instructions()
    write_model(out / "init", build_tokenizer(text), SIZES, 0)
    file = Path(__file__).with_name("data") / "sft.jsonl"
    write_lines(out / "sft.jsonl", demonstrations(text, file, random.Random("tiny-code-pi")))


if __name__ == "__main__":
    main()
