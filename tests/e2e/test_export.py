"""An exported policy: plain transformers and plain vLLM say what the run's own servers said.

The short form runs in the suite; `make test-models` adds `chat`, the server and client of
docs/serving.md, and training from the export.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from agent_r1.runs.store import stored_files
from tests.e2e.conftest import ResumedRun
from tests.support.runs import finished, set_options, steps, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
FULL = pytest.mark.models
ROOT = Path(__file__).resolve().parents[2]
TURNS = 4
PRINTED = "printed"
"""What `agent-r1 export` has printed, beside the folder that it wrote."""


@pytest.fixture(scope="module")
def exported(resumed_run: ResumedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "out"
    (out.parent / PRINTED).write_text(finished("export", resumed_run.folder, out))
    return out


@pytest.fixture(scope="module")
def answered(resumed_run: ResumedRun) -> list[dict[str, Any]]:
    """The greedy answers of the last policy, as the run's servers gave them."""
    (file,) = [one for one in stored_files(resumed_run.folder) if one.evaluation == "after"]
    return [record for record in file.records() if record["status"] == "COMPLETED"]


def messages_of(record: dict[str, Any], turns: int) -> list[dict[str, Any]]:
    """The dialogue before a turn, as a client of a server has it."""
    messages = list(record["prompt"])
    for turn in record["turns"][:turns]:
        calls = [
            {"type": "function", "function": {"name": c["tool"], "arguments": c["arguments"]}}
            for c in turn["calls"]
        ]
        content = turn["text"].partition("<tool_call>")[0]
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        messages += [{"role": "tool", "content": c["text"]} for c in turn["calls"]]
    return messages


def test_plain_transformers_sample_the_same_tokens(exported: Path, answered: list[dict[str, Any]]):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    agent = json.loads((exported / "agent.json").read_text())
    same = 0
    for record in answered[:TURNS]:
        last = len(record["turns"]) - 1
        prompt = tokenizer.apply_chat_template(
            messages_of(record, last),
            tools=agent["tools"],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = model.generate(**prompt, max_new_tokens=agent["sampling"]["max_tokens"])
        token_ids = out[0].numpy().astype(np.int32)
        digest = hashlib.blake2b(token_ids.tobytes(), digest_size=8).hexdigest()
        # Of the whole dialogue: the template, the tool's texts, and every sampled token.
        same += digest == record["token_digest"]
    # Two tokens may be as likely as each other; that is rare.
    assert same >= TURNS - 1


def options_of(command: str) -> set[str]:
    return set(re.findall(r"--[a-z-]+", command))


@pytest.fixture(scope="module")
def served(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The export behind vLLM's own server, which the printed command starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (printed,) = re.findall(r"serve it: python (.*)", (exported.parent / PRINTED).read_text())
    command = [sys.executable, *printed.split(), "--port", str(port), "--enforce-eager"]
    log = tmp_path_factory.mktemp("served") / "log"
    with log.open("wb") as file:
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    try:
        wait_until(is_up, "the server to answer")
        yield url
    finally:
        process.terminate()
        process.wait(60)


@FULL
def test_plain_vllm_and_the_documented_client_answer_as_chat_does(
    served: str,
    exported: Path,
    resumed_run: ResumedRun,
    answered: list[dict[str, Any]],
    tmp_path: Path,
):
    record = next(one for one in answered if one["turns"][0]["calls"])
    question = record["prompt"][-1]["content"]
    said = finished("chat", resumed_run.folder, "--question", question)
    turns = [line.removeprefix("model> ") for line in said.splitlines() if "model> " in line]
    assert turns == [turn["text"] for turn in record["turns"]]
    document = (ROOT / "docs" / "serving.md").read_text()
    (shown,) = re.findall(r"vllm serve out (.*)", document)
    on_a_cpu = {"--model", "--kv-cache-memory-bytes"}
    assert options_of(shown) == options_of((exported.parent / PRINTED).read_text()) - on_a_cpu
    client = next(
        c for c in re.findall(r"```python\n(.*?)```", document, re.DOTALL) if "Ask a" in c
    )
    (tmp_path / "ask.py").write_text(client)
    found = {
        call["arguments"]["query"]: call["text"]
        for turn in record["turns"]
        for call in turn["calls"]
    }
    tools = f"FOUND = {found!r}\n\ndef search(query):\n    return FOUND[query]\n"
    (tmp_path / "my_tools.py").write_text(tools)
    done = subprocess.run(
        [sys.executable, "ask.py", str(exported), question, f"{served}/v1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == turns[-1]
    # The calls on their way: those of the run.
    assert done.stderr.count("search({") == sum(len(turn["calls"]) for turn in record["turns"])


@FULL
def test_training_goes_on_from_the_export(exported: Path, resumed_run: ResumedRun, tmp_path: Path):
    options = {"learner.steps": 1, "evaluation.before": "false", "evaluation.after": "false"}
    run = tmp_path / "further"
    finished(
        *("train", resumed_run.config, "--from", exported, "--run-dir", run),
        *set_options({**options, "evaluation.every": 0}),
    )
    assert json.loads((run / "config.json").read_text())["model"]["path"] == str(exported)
    (step,) = steps(run)
    # The servers hold the export's weights: else the learner would not find their probabilities.
    assert step["logprob/abs_diff_mean"] <= 1e-5
