"""Every code block of the documentation is run, or read by what it is for.

Python is executed; TOML is a configuration; JSON and YAML are read; a command of `agent-r1` goes
through the real parser, and scripts exist. Shell blocks are run here or by `make test-docs`, or
another test runs the same (tests/support/doc_commands.py). A block that needs a GPU, a hub or a
download stands below a visible line that says so. These are counted.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_r1.cli.parser import build_parser
from agent_r1.config.run import Config
from agent_r1.evaluation.experiments.config import MatrixFile
from tests.support.doc_blocks import Block, blocks, commands
from tests.support.doc_commands import ELSEWHERE, QUICK, RUN, is_named

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "proto").glob("*.md")),
    *sorted((REPOSITORY / "examples").glob("*/README.md")),
]
LANGUAGES = ("python", "toml", "json", "yaml", "sh", "text")
NUM_MARKED = 11
"""Blocks that no test runs; a new one is a decision."""
PYTHON_ELSEWHERE = {
    ("docs/run-folder.md", "import agent_r1"): "tests/unit/runs/test_run.py",
    ("docs/mcp.md", "from mcp import Client"): "tests/integration/test_mcp_server.py",
    ("docs/serving.md", '"""Ask a served agent: python ask.py OUT QUESTION [URL]."""'): (
        "tests/e2e/test_export.py"
    ),
    ("docs/serving.md", "from transformers import AutoModelForCausalLM, AutoTokenizer"): (
        "tests/e2e/test_export.py"
    ),
    ("docs/serving.md", '"""my_tools.py"""'): "tests/unit/test_docs_serving.py",
    ("docs/mcp.md", "from mcp.server.mcpserver import MCPServer"): (
        "tests/support/mcp_notes_server.py"
    ),
}
"""Python that serves or needs a service, by page and first line: where tests have the same."""


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(language: str) -> list[Block]:
    """Return the blocks of a language that are to run."""
    return [block for block in BLOCKS if block.language == language and not block.marked]


def test_every_block_says_what_it_is():
    assert len(BLOCKS) > 50
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


def test_the_blocks_that_are_not_run_are_counted():
    marked = [str(block) for block in BLOCKS if block.marked]
    assert len(marked) == NUM_MARKED, marked


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_is_a_configuration(block: Block):
    table = tomllib.loads(block.text)
    if "models" in table:
        MatrixFile.model_validate(table)
        return
    if "baseline" in table or "methods" in table:
        pytest.fail("tables of methods have their own file; show keys of it in the text")
    Config.model_validate({"model": {"path": "any"}, **table})


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_is_json(block: Block):
    json.loads(block.text)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_yaml(block: Block):
    yaml.safe_load(block.text)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = block.text.splitlines()[0]
    if test := PYTHON_ELSEWHERE.get((block.page, first)):
        assert (REPOSITORY / test).is_file()
        compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return
    answer = {"failed": False, "id": "q", "prediction": "Rome", "answers": ["Rome"]}
    (tmp_path / "scores.jsonl").write_text(json.dumps(answer) + "\n")
    monkeypatch.chdir(tmp_path)
    # The reference of the classes shows parts of a module.
    names: dict[str, Any] = {"__name__": "example"}
    if block.page == "docs/classes.md":
        exec("from dataclasses import replace\nfrom agent_r1 import *", names)
    exec(compile(block.text, str(block), "exec"), names)


def words_of(command: str, program: str) -> list[str] | None:
    """Return the arguments of a program where a command line calls it."""
    words = shlex.split(command)
    while words and re.match(r"^[A-Z][A-Z0-9_]*=", words[0]):
        words.pop(0)
    names = (program, f".venv/bin/{program}")
    return words[1:] if words and words[0] in names else None


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_commands_are_what_the_program_takes(block: Block, capsys: pytest.CaptureFixture[str]):
    for command in commands(block.text):
        arguments = words_of(command, "agent-r1")
        if arguments is None:
            continue
        end = next((i for i, w in enumerate(arguments) if w in ("|", ">", "&", "&&", ";")), None)
        try:
            build_parser().parse_args(arguments[:end])
        except SystemExit:
            pytest.fail(f"{command}: {capsys.readouterr().err}")


COMMON = {"agent-r1", "python", ".venv", "scripts", "examples", "runs", "docs", "exec", "make"}


def telling_words(block: Block) -> list[str]:
    """Return the words by which the commands of a block are known."""
    words = [word for command in commands(block.text) for word in re.split(r"[\s=/]+", command)]
    return [word for word in words if len(word) > 3 and word not in COMMON]


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_every_shell_block_is_run_by_a_test(block: Block):
    if is_named(block, QUICK) or is_named(block, RUN):
        return
    first = commands(block.text)[0]
    tests = {
        test
        for (page, start), test in ELSEWHERE.items()
        if block.page == page and first.startswith(start)
    }
    assert len(tests) == 1, f"tests/support/doc_commands.py does not say which test runs {block}"
    text = (REPOSITORY / tests.pop()).read_text()
    assert any(word in text for word in telling_words(block)), telling_words(block)


def test_no_test_is_named_for_a_block_that_is_gone():
    blocks = of("sh")
    for named in (QUICK, RUN, ELSEWHERE):
        for entry in named:
            assert any(is_named(block, {entry}) for block in blocks), entry


@pytest.mark.parametrize("block", [b for b in of("sh") if is_named(b, QUICK)], ids=str)
def test_quick_commands_run(block: Block, tmp_path: Path):
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)


SCRIPT = re.compile(r"^(\./)?(scripts/\w+|(scripts|examples|deploy)/[\w/-]+\.py)$")


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_scripts_that_are_called_exist(block: Block):
    for command in commands(block.text):
        for word in shlex.split(command):
            if SCRIPT.match(word):
                assert (REPOSITORY / word).is_file(), command


KEY = re.compile(
    r"`((?:run|model|data|env|reward|redis|rollout|learner|placement|evaluation|sft|episodes)"
    r"\.[a-z_]+)(?: = [^`]*)?`"
)
FILES = re.compile(r"\.(toml|jsonl?|lock|acl)$")
PAGES_WITH_KEYS = [
    page
    for page in PAGES
    # The first tells of older keys; the others name those of the chart as well.
    if page.name != "CHANGELOG.md" and page.parent.name != "deploy"
]


@functools.cache
def known_keys() -> set[str]:
    schema = Config.model_json_schema()
    known: set[str] = set()
    for table, entry in schema["properties"].items():
        for option in [entry, *entry.get("anyOf", [])]:
            if "$ref" in option:
                found = schema["$defs"][option["$ref"].rpartition("/")[2]]
                known |= {f"{table}.{key}" for key in found["properties"]}
    return known


@pytest.mark.parametrize(
    "page", PAGES_WITH_KEYS, ids=lambda page: str(page.relative_to(REPOSITORY))
)
def test_keys_that_are_named_exist(page: Path):
    named = {name for name in KEY.findall(page.read_text()) if not FILES.search(name)}
    assert named - known_keys() == set()
