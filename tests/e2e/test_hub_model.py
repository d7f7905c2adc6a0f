"""Training a model that is a name on a hub: one download, and services that ask the hub nothing.

The hub is a server of ours (tests/support/hub_server.py); this was not run against the real one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.hub_server import COMMIT, serving_hub
from tests.support.runs import finished, set_options, steps, write_config

pytestmark = [pytest.mark.models, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
NAME = "owner/tiny"
OPTIONS = {
    "learner.steps": 1,
    "evaluation.every": 0,
    "evaluation.before": "false",
    "evaluation.after": "false",
}


def test_the_launcher_downloads_once_and_nobody_else_asks(
    tmp_path: Path, world_files: Path, tiny_base_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    config = write_config(tmp_path, run_id="hub", base=tiny_base_dir, world=world_files)
    config.write_text(re.sub(r'path = ".*"', f'path = "{NAME}"', config.read_text(), count=1))
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with serving_hub(NAME, tiny_base_dir) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        run = tmp_path / "run"
        printed = finished("train", config, "--run-dir", run, *set_options(OPTIONS))
        assert f"downloading {NAME}: " in printed
        assert hub.sent_bytes == len(hub.files["model.safetensors"])
        assert json.loads((run / "config.json").read_text())["model"]["path"] == NAME
        assert COMMIT in json.loads((run / "summary.json").read_text())["model"]
        (step,) = steps(run)
        assert step["logprob/abs_diff_mean"] <= 1e-5
        hub.requests.clear()
        local = tmp_path / "local"
        further = ("--from", run, "--run-dir", local)
        finished("train", config, *further, *set_options(OPTIONS))
        # A folder needs no hub, and nobody has been told to do without one.
        assert hub.requests == []
