"""The worked example of docs/tools.md, served as it stands there by the command it names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
from pydantic import TypeAdapter

from agent_r1.attempts.tool_transport import OUTAGES
from agent_r1.tools.config import BUILTIN_TOOLS
from agent_r1.tools.function import tool_class_of
from agent_r1.tools.kinds import AnyToolConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "tools.md").read_text()
START_TIMEOUT_S = 30.0


def test_the_example_is_one_short_class_that_serves_from_its_own_folder(tmp_path: Path):
    code, _ = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert len(code.splitlines()) < 30
    (tmp_path / "my_module.py").write_text(code)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AGENT_R1__")}
    command = [str(Path(sys.executable).with_name("agent-r1")), "serve", "tool"]
    command += ["my_module:WordCount", "--announce-dir", str(tmp_path / "up")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        announced = tmp_path / "up" / "word_count.json"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not announced.exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        url = json.loads(announced.read_text())["url"]
        call = {"name": "word_count", "rollout_id": "r", "turn": 0, "timeout_s": 5}
        texts = []
        for arguments in ({"text": "three small words"}, {}):
            body = {"calls": [call | {"arguments": arguments}]}
            reply = httpx.post(f"{url}/call", json=body).json()
            texts += [result["parts"][0]["text"] for result in reply["results"]]
        assert texts[0] == "3 words"
        assert "'text' is a required property" in texts[1]
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_every_built_in_tool_is_named():
    assert all(f"`{name}`" in DOCUMENT for name in BUILTIN_TOOLS)


def test_every_kind_of_outage_has_a_rule():
    attempts = ROOT / "services" / "attempts"
    client = "".join(
        (attempts / f"tool_{name}.py").read_text() for name in ("client", "discovery", "transport")
    )
    kinds = set(re.findall(r'"(tool_[a-z0-9_]+)"', client))
    assert kinds == OUTAGES.keys()


def test_the_function_of_the_page_is_a_tool():
    _, code = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    module: dict[str, object] = {"__name__": "page"}
    exec(code, module)  # the annotations are evaluated in it
    found = tool_class_of(module["convert"])
    assert found is not None
    assert found().spec().parameters["required"] == ["degrees"]


def test_the_tables_of_the_page_are_valid():
    for block in re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL):
        for table in tomllib.loads(block)["tools"].values():
            TypeAdapter(AnyToolConfig).validate_python(table)
