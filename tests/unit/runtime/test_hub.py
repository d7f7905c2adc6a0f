"""Models by name: fetched once, continued, refused with a reason. The hub is a server of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import COMMIT, HubServer, serving_hub

NAME = "owner/model"
WEIGHTS = 3_000_000
FETCH = """
import sys
from agent_r1.runtime.files.hub import model_folder
revision = sys.argv[2] or None
try:
    folder = model_folder(sys.argv[1], revision, report=lambda line: print("told:", line))
except ValueError as exc:
    sys.exit(f"{type(exc).__name__}: {exc}")
print(folder)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(WEIGHTS))
    (folder / "consolidated.safetensors").write_bytes(b"the weights again")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    with serving_hub(NAME, folder) as served:
        yield served


def fetch(
    hub: HubServer, cache: Path, revision: str = "", name: str = NAME, **variables: str
) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", FETCH, name, revision],
        env={
            **inherited,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_model_is_fetched_once_with_what_it_needs_and_no_code(hub: HubServer, tmp_path: Path):
    done = fetch(hub, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    *told, folder = done.stdout.splitlines()
    assert told[0].startswith("told: downloading owner/model: 3.00 MB into ")
    names = {path.name for path in Path(folder).iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (Path(folder) / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    again = fetch(hub, tmp_path / "cache")
    assert again.stdout.splitlines() == [folder]
    assert hub.sent_bytes == WEIGHTS
    # The lines that are told stand for the bars of the hub's client.
    assert "Fetching" not in done.stderr + again.stderr


def test_a_connection_that_breaks_is_continued(hub: HubServer, tmp_path: Path):
    hub.files["model.safetensors"] = os.urandom(25_000_000)
    hub.cut_after = 22_000_000
    done = fetch(hub, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    # The client keeps pieces of 10 MiB: two of the 22 MB that arrived, so it asks for 4.03 MB more.
    assert hub.sent_bytes == 22_000_000 + 25_000_000 - 2 * 10 * 2**20


def test_files_that_are_complete_are_not_fetched_again(hub: HubServer, tmp_path: Path):
    hub.files["model-2.safetensors"] = os.urandom(1000)
    hub.broken = "model-2.safetensors"
    first = fetch(hub, tmp_path / "cache")
    assert first.returncode == 1
    assert "HubError: model.path (owner/model) is neither" in first.stderr
    hub.broken = ""
    done = fetch(hub, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert hub.sent_bytes == WEIGHTS + 1000


def test_a_commit_is_taken_as_it_is_and_an_unknown_revision_refused(hub: HubServer, tmp_path: Path):
    done = fetch(hub, tmp_path / "cache", COMMIT)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).name == COMMIT
    done = fetch(hub, tmp_path / "cache", "nightly")
    assert done.returncode == 1
    assert "HubError: model.path (owner/model, revision nightly) is neither" in done.stderr


def test_offline_only_when_the_user_says_so(hub: HubServer, tmp_path: Path):
    folder = fetch(hub, tmp_path / "cache").stdout.splitlines()[-1]
    asked = len(hub.requests)
    offline = fetch(hub, tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert (offline.stdout.splitlines(), len(hub.requests)) == ([folder], asked)
    # A hub that cannot be reached is an error, and not a copy that may be an old one.
    lost = fetch(hub, tmp_path / "cache", HF_ENDPOINT="http://127.0.0.1:9")
    assert lost.returncode == 1
    assert "set HF_HUB_OFFLINE=1 to use a copy in the hub's cache" in lost.stderr


def test_an_unknown_name_is_refused(hub: HubServer, tmp_path: Path):
    done = fetch(hub, tmp_path / "cache", name="owner/nothing")
    assert done.returncode == 1
    assert "model.path (owner/nothing) is neither a directory nor a model" in done.stderr


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(
    hub: HubServer, tmp_path: Path
):
    full = FETCH.replace(
        "import sys\n", "import sys, shutil\nshutil.disk_usage = lambda _: Usage\n"
    )
    full = f"class Usage:\n    free = 1000\n{full}"
    done = subprocess.run(
        [sys.executable, "-c", full, NAME, ""],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "0.00 MB free, and the files of owner/model need 3.30 MB" in done.stderr
    assert "set HF_HOME to a folder on a larger disk" in done.stderr
    assert hub.sent_bytes == 0


def test_a_folder_that_is_not_there_is_no_name(hub: HubServer, tmp_path: Path):
    done = fetch(hub, tmp_path / "cache", name="./nothing")
    assert "model.path (./nothing) is not a directory" in done.stderr
    assert hub.requests == []
