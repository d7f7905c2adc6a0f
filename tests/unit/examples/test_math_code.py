"""examples/math and examples/code: published files become task files, strictly."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent_r1.config.run import load_config
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1.sandbox.checks import read_checks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_prepare", EXAMPLES / name / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MATH, CODE = load("math"), load("code")

GSM = {"question": "How many?", "answer": "2 * 600 = <<2*600=1200>>1200\n#### $1,200"}
PROBLEM = {
    "problem": "What is $x$?",
    "solution": "…",
    "answer": "\\frac{1}{2}",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/1.json",
}
HUMANEVAL = {
    "task_id": "HumanEval/2",
    "prompt": 'def f(x):\r\n    """Doubles."""\r\n',
    "entry_point": "f",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}
MBPP = {
    "text": "Write a function to double.",
    "code": "def f(x):\r\n  return 2 * x",
    "task_id": 11,
    "test_setup_code": "y = f(1)\r\n",
    "test_list": ["assert f(1) == 2 ", "assert f(2) == 4"],
    "challenge_test_list": [],
}


def write(path: Path, *records: dict[str, Any]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_word_problems_ask_for_a_number(tmp_path: Path, suffix: str):
    source, out = write(tmp_path / f"gsm{suffix}", GSM), tmp_path / "out.jsonl"
    assert MATH.main(["gsm8k", "--source", str(source), "--out", str(out), "--set", "train"]) == 0
    (task,) = read_task_file(out)
    assert task.payload == {"answers": ["1200"], "answer_type": "number"}
    assert task.metadata == {"set": "train", "type": "word_problem"}
    assert isinstance(task.prompt, str)
    assert task.prompt.endswith("\n\nHow many?")
    assert "1200" not in task.prompt


def test_problems_keep_their_latex_answer(tmp_path: Path):
    (task,) = MATH.read_tasks("math", write(tmp_path / "m.jsonl", PROBLEM), "math500")
    assert task.id == "math500-test/algebra/1.json"
    assert task.payload == {"answers": ["\\frac{1}{2}"]}
    assert task.metadata == {"set": "math500", "type": "Algebra", "level": 1}


def test_hidden_tests_go_to_the_tool_and_line_ends_are_mended(tmp_path: Path):
    (task,) = CODE.read_tasks("humaneval", write(tmp_path / "h.jsonl", HUMANEVAL))
    assert task.tools == ["code_tests"]
    assert task.tool_context == {
        "prompt": 'def f(x):\n    """Doubles."""\n',
        "entry_point": "f",
        "check": HUMANEVAL["test"],
    }
    assert isinstance(task.prompt, str)
    assert "candidate" not in task.prompt
    (task,) = CODE.read_tasks("mbpp", write(tmp_path / "b.jsonl", MBPP))
    assert task.tool_context == {
        "tests": ["assert f(1) == 2", "assert f(2) == 4"],
        "setup": "y = f(1)\n",
    }
    assert task.payload == {"solution": "def f(x):\n  return 2 * x"}
    assert isinstance(task.prompt, str)
    assert "assert f(1) == 2" in task.prompt
    assert "assert f(2) == 4" not in task.prompt


def test_ids_choose_a_split(tmp_path: Path):
    source = write(tmp_path / "b.jsonl", *(MBPP | {"task_id": n} for n in (2, 11, 510, 511)))
    assert [task.id for task in CODE.read_tasks("mbpp", source, (11, 510))] == [
        "MBPP/11",
        "MBPP/510",
    ]
    with pytest.raises(CODE.SourceError, match=r"no task with an id from \(600, 700\)"):
        CODE.read_tasks("mbpp", source, (600, 700))


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("gsm8k", json.dumps(GSM | {"answer": "no number"}), r":2: .*must end with `#### number`"),
        ("gsm8k", json.dumps(PROBLEM), r":2: question: Field required"),
        ("math", json.dumps(PROBLEM | {"answer": " "}), r":2: answer is empty"),
        ("math", json.dumps(PROBLEM | {"level": "1"}), r":2: level: Input should be a valid int"),
        ("math", "{", r":2: not JSON: .* at column"),
        ("math", "", r":2: the line is empty"),
        ("math", json.dumps(PROBLEM), r":2: the same problem as at .*:1"),
        ("humaneval", json.dumps(HUMANEVAL | {"test": "x"}), r":2: test must define check"),
        ("humaneval", json.dumps(HUMANEVAL), r":2: id 'HumanEval/2' was used at .*:1"),
        ("mbpp", json.dumps(MBPP | {"test_list": []}), r":2: test_list is empty"),
        ("mbpp", json.dumps(MBPP | {"prompt": "x"}), r":2: prompt: Extra inputs"),
    ],
)
def test_a_record_that_does_not_fit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, line: str, message: str
):
    good = {"gsm8k": GSM, "math": PROBLEM, "humaneval": HUMANEVAL, "mbpp": MBPP}[kind]
    source, out = tmp_path / "source.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(good) + "\n" + line + "\n")
    module = MATH if kind in MATH.MAKERS else CODE
    with pytest.raises(module.SourceError, match=message):
        module.read_tasks(kind, source, *(["name"] if module is MATH else []))
    assert module.main([kind, "--source", str(source), "--out", str(out)]) == 2
    assert f"error: {source}:2:" in capsys.readouterr().err
    assert not out.exists()


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(b"{}" * 100)[:-9])
    for path, message in (
        (tmp_path / "missing.jsonl", "does not exist"),
        (broken, "cannot be read"),
        (write(tmp_path / "empty.jsonl"), ":1: the file is empty"),
    ):
        with pytest.raises(MATH.SourceError, match=message):
            MATH.read_tasks("math", path, "math")


@pytest.mark.parametrize(
    ("kind", "file", "count"),
    [
        ("gsm8k", "gsm8k_test", 660),
        ("gsm8k", "gsm8k_train", 7473),
        ("math", "math500", 251),
        ("humaneval", "humaneval", 82),
        ("mbpp", "mbpp", 487),
    ],
)
def test_every_real_record_becomes_a_task(real_data_dir: Path, kind: str, file: str, count: int):
    module = MATH if kind in MATH.MAKERS else CODE
    source = real_data_dir / f"{file}.jsonl.gz"
    tasks = module.read_tasks(kind, source, *([kind] if module is MATH else []))
    assert len(tasks) == count
    for task in tasks:
        assert "\r" not in task.prompt
        if module is CODE:
            assert "\r" not in task.payload["solution"]
            _, checks = read_checks(task.tool_context)
            assert checks


@pytest.mark.parametrize("name", ["math", "code"])
def test_the_run_configurations_are_valid(name: str):
    config = load_config(EXAMPLES / name / "run.toml").config
    assert config.env.type == name
    (tool,) = config.tools
    assert config.tools[tool].type == tool
