"""`run.log_format` decides what a service writes to its standard error."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging
from agent_r1.cli.services.serve import configure_logging
from agent_r1.runtime.config import RunConfig
configure_logging(RunConfig(id="demo", log_format={log_format!r}), "reward")
logging.getLogger("agent_r1.reward").info("trajectory scored rollout_id=%s", "demo/1/7/2/0")
"""


def logged(log_format: str) -> str:
    command = [sys.executable, "-c", PROGRAM.format(log_format=log_format)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_json_names_run_service_group_and_sample() -> None:
    line = json.loads(logged("json"))
    assert line["message"] == "trajectory scored"
    assert (line["run_id"], line["service"]) == ("demo", "reward")
    assert (line["group_id"], line["sample_index"]) == (7, 2)


def test_text_is_one_plain_line() -> None:
    text = "INFO agent_r1.reward trajectory scored rollout_id=demo/1/7/2/0\n"
    assert logged("text").endswith(text)
