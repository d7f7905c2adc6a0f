"""`make test-docs`: shell blocks of the documentation, run as they stand with a small run.

The world, the model and the configuration are those of tiny_world, which `agent-r1 init` writes;
variables of the environment make every command short. tests/support/doc_commands.py lists the
blocks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doc_blocks import Block, blocks
from tests.support.doc_commands import RUN, is_named

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.docs, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
PLACES = {"CONFIG": "run.toml", "MODEL_OR_RUN": "runs/demo", "RUN": "runs/demo", "S": "1"}
"""What a reader puts in the place of these words."""
SHORT = {
    "LEARNER__STEPS": "2",
    "LEARNER__GROUPS_PER_BATCH": "2",
    "LEARNER__CHECKPOINT_EVERY": "1",
    "EVALUATION__EVERY": "1",
    "EVALUATION__MAX_QUESTIONS": "4",
    "EVALUATION__MAX_QUESTIONS_DURING": "4",
    "DIAGNOSE__GROUPS": "2",
    "DIAGNOSE__ATTEMPTS": "2",
}
PAGES = [*sorted((REPOSITORY / "docs").rglob("*.md")), *REPOSITORY.glob("examples/*/README.md")]
BLOCKS = [
    block
    for entry in RUN  # in the order in which a reader needs them
    for page in PAGES
    for block in blocks(page)
    if block.language == "sh" and not block.marked and is_named(block, [entry])
]


def run(command: str, folder: Path) -> str:
    """Run a command in bash; a failure fails the test."""
    environment = {
        **os.environ,
        **{f"AGENT_R1__{key}": value for key, value in SHORT.items()},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_world as `init` writes it, with a run in runs/demo and the scores of its base."""
    folder = tmp_path_factory.mktemp("docs") / "demo"
    run(f"agent-r1 init {folder} --example tiny_world", folder.parent)
    (folder / "examples").mkdir()
    (folder / "examples" / "tiny_world").symlink_to(folder)
    unwanted = shutil.ignore_patterns("data", "__pycache__")
    deep_world = REPOSITORY / "examples" / "deep_world"
    shutil.copytree(deep_world, folder / "examples" / "deep_world", ignore=unwanted)
    run("agent-r1 train run.toml --run-dir runs/demo", folder)
    run("agent-r1 evaluate run.toml --policy base --out base.jsonl", folder)
    return folder


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_commands_of_a_block_run(block: Block, folder: Path):
    shutil.rmtree(folder / "runs" / "further", ignore_errors=True)
    places = "|".join(PLACES)
    run(re.sub(rf"\b({places})\b", lambda found: PLACES[found[1]], block.text), folder)
