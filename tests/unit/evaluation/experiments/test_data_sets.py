"""Public data sets become questions, and questions tasks, whatever file or hub they come from."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.experiments import prompts
from agent_r1.evaluation.experiments.config import METHODS, SET_NAMES, SetName
from agent_r1.evaluation.experiments.data_sets import (
    CODE,
    DATA_SETS,
    MATHS,
    MULTIHOP,
    NoDataError,
    read_questions,
)
from agent_r1.evaluation.experiments.questions import Question
from agent_r1.runtime.files.published_data import SourceError
from agent_r1.runtime.files.task_source import DataSource
from agent_r1_proto.tools import ToolSpec

# One record of each format as it is published, with contents of our own.
SAMPLES: Mapping[SetName, dict[str, Any]] = {
    "math500": {
        "problem": "What is $1 + 1$?",
        "solution": "It is $\\boxed{2}$.",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "gsm8k": {"question": "A box holds 1,200 pens. How many?", "answer": "Count.\n#### 1,200"},
    "humaneval": {
        "task_id": "HumanEval/7",
        "prompt": 'def one():\n    """Return 1."""\n',
        "entry_point": "one",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    },
    "mbpp": {
        "text": "Write a function that returns 1.",
        "code": "def one():\r\n  return 1",
        "task_id": 11,
        "test_setup_code": "",
        "test_list": ["assert one() == 1"],
        "challenge_test_list": [],
    },
    "hotpotqa": {
        "_id": "5a",
        "question": "Who wrote it?",
        "answer": "Ada",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Ada", 0]],
        "context": [["Ada", ["Ada wrote it."]]],
    },
    "2wikimultihopqa": {  # as the hub has it
        "id": "2w",
        "question": "Who is older?",
        "answer": "Ada",
        "type": "comparison",
        "supporting_facts": {"title": ["Ada"], "sent_id": [0]},
        "context": {"title": ["Ada"], "sentences": [["Ada was born."]]},
        "evidences": [],
    },
    "musique": {
        "id": "2hop__1_2",
        "paragraphs": [],
        "question": "Where was she born?",
        "question_decomposition": [],
        "answer": "London",
        "answer_aliases": ["City of London", "London"],
        "answerable": True,
    },
}
PAYLOADS: Mapping[SetName, dict[str, Any]] = {
    "math500": {"answers": ["2"]},
    "gsm8k": {"answers": ["1200"], "answer_type": "number"},
    "humaneval": {},
    "mbpp": {},
    "hotpotqa": {"answers": ["Ada"]},
    "2wikimultihopqa": {"answers": ["Ada"]},
    "musique": {"answers": ["London", "City of London"]},
}
SPEC = ToolSpec(name="search", version="1", description="Finds.", parameters={"type": "object"})
REAL_FILES: Mapping[SetName, str] = {
    "math500": "math500",
    "gsm8k": "gsm8k_test",
    "humaneval": "humaneval",
    "mbpp": "mbpp",
    "hotpotqa": "hotpotqa_dev",
    "2wikimultihopqa": "2wikimultihopqa_dev",
    "musique": "musique_dev",
}


def source(folder: Path, *records: dict[str, Any], max_items: int | None = None) -> DataSource:
    file = folder / "published.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataSource(source=file, max_items=max_items)


@pytest.mark.parametrize("name", SET_NAMES)
def test_a_published_record_becomes_a_question(tmp_path: Path, name: SetName):
    (question,) = read_questions(name, source(tmp_path, SAMPLES[name]))
    assert question.payload == PAYLOADS[name]
    asked = SAMPLES[name]
    assert str(asked.get("question") or asked.get("problem") or "") in question.text


def test_programs_carry_their_tests_where_the_model_does_not_see_them(tmp_path: Path):
    (human,) = read_questions("humaneval", source(tmp_path, SAMPLES["humaneval"]))
    assert human.tool_context == {
        "prompt": SAMPLES["humaneval"]["prompt"],
        "entry_point": "one",
        "check": SAMPLES["humaneval"]["test"],
    }
    (mbpp,) = read_questions("mbpp", source(tmp_path, SAMPLES["mbpp"]))
    assert mbpp.tool_context == {"tests": ["assert one() == 1"], "setup": ""}


def test_only_the_evaluation_part_of_mbpp_is_asked(tmp_path: Path):
    records = [{**SAMPLES["mbpp"], "task_id": number} for number in (2, 10, 11, 510, 511)]
    found = read_questions("mbpp", source(tmp_path, *records))
    assert [question.id for question in found] == ["MBPP/11", "MBPP/510"]


def test_questions_without_an_answer_are_left_out(tmp_path: Path):
    unanswerable = {**SAMPLES["musique"], "id": "2hop__3_4", "answerable": False}
    found = read_questions("musique", source(tmp_path, unanswerable, SAMPLES["musique"]))
    assert [question.id for question in found] == ["2hop__1_2"]


def test_records_of_parquet_are_not_padded_with_the_fields_of_others(tmp_path: Path):
    records = [
        {"_id": "a", "question": "Who?", "answer": "Ada"},
        {"id": "b", "question": "Where?", "answers": ["Rome"], "answer_aliases": ["Roma"]},
    ]
    names = dict.fromkeys(name for record in records for name in record)
    table = importlib.import_module("pyarrow").Table.from_pylist([{**names, **r} for r in records])
    file = tmp_path / "d.parquet"
    importlib.import_module("pyarrow.parquet").write_table(table, file)
    found = read_questions("musique", DataSource(source=file))
    assert [(q.id, q.payload["answers"]) for q in found] == [
        ("a", ["Ada"]),
        ("b", ["Rome", "Roma"]),
    ]


def test_max_items_takes_the_first_questions(tmp_path: Path):
    records = [{**SAMPLES["hotpotqa"], "_id": name} for name in "abc"]
    found = read_questions("hotpotqa", source(tmp_path, *records, max_items=2))
    assert [question.id for question in found] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gsm8k", {"answer": "four"}, "must end with `#### number`"),
        ("hotpotqa", {"answer": None}, "the question has no answer"),
        ("humaneval", {"test": "assert True"}, "must define check(candidate)"),
        ("mbpp", {"test_list": []}, "test_list"),
        ("math500", {"answer": ""}, "answer"),
    ],
)
def test_a_record_that_does_not_fit_is_named(
    tmp_path: Path, name: SetName, change: dict[str, Any], reason: str
):
    with pytest.raises(SourceError) as caught:
        read_questions(name, source(tmp_path, {**SAMPLES[name], **change}))
    assert "published.jsonl:1" in str(caught.value)
    assert reason in str(caught.value)


def test_a_question_that_comes_twice_is_refused(tmp_path: Path):
    with pytest.raises(SourceError, match=r"jsonl:2: id '5a' comes twice"):
        read_questions("hotpotqa", source(tmp_path, SAMPLES["hotpotqa"], SAMPLES["hotpotqa"]))


@pytest.mark.parametrize("missing", [None, DataSource(source=Path("/nowhere/gsm8k.jsonl"))])
def test_a_set_that_is_not_there_says_where_to_get_it(missing: DataSource | None):
    with pytest.raises(NoDataError, match="hf:openai/gsm8k/main:test"):
        read_questions("gsm8k", missing)


@pytest.mark.parametrize("name", SET_NAMES)
def test_the_real_files_are_read_whole(real_data_dir: Path, name: SetName):
    file = real_data_dir / f"{REAL_FILES[name]}.jsonl.gz"
    questions = read_questions(name, DataSource(source=file))
    assert len(questions) > 80
    for method in METHODS:
        task = prompts.make_task(questions[0], name, method, DATA_SETS[name].family, SPEC)
        assert questions[0].text in task.messages()[0].text()


# --- prompts --------------------------------------------------------------------------------------


QUESTION = Question("q", "Who?", {"answers": ["Ada"]}, type="bridge")


def asked(method: Any, family: Any = MULTIHOP) -> str:
    return prompts.make_task(QUESTION, "hotpotqa", method, family, SPEC).messages()[0].text()


def test_every_method_asks_for_the_same_form_of_answer():
    for method in METHODS:
        assert asked(method).endswith("\n\nWho?")
        assert "<answer> and </answer>" in asked(method)
    assert len({asked(method) for method in METHODS}) == len(METHODS)


@pytest.mark.parametrize(
    ("method", "family", "tools", "turns", "style"),
    [
        ("direct", MULTIHOP, [], 1, "native"),
        ("chain_of_thought", MATHS, [], 1, "native"),
        ("react", MULTIHOP, ["search"], None, "react"),
        ("tools_single_turn", MATHS, ["python_exec"], 2, "native"),
        ("tools_multi_turn", MULTIHOP, ["search"], None, "native"),
        # A program is run even where it is only written; its one call is the answer.
        ("direct", CODE, ["code_tests"], 1, "code_block"),
        ("tools_single_turn", CODE, ["code_tests"], 1, "native"),
        ("tools_multi_turn", CODE, ["code_tests"], None, "native"),
    ],
)
def test_a_method_decides_tools_turns_and_how_calls_are_written(
    method: Any, family: Any, tools: list[str], turns: int | None, style: str
):
    task = prompts.make_task(QUESTION, "s", method, family, SPEC)
    assert task.tools == tools
    assert prompts.max_turns(method, family) == turns
    assert prompts.call_style(method, family) == style
    assert task.metadata == {"set": "s", "type": "bridge"}


def test_react_tells_the_model_about_its_tool():
    assert 'search: Finds.\nIts arguments: {"type": "object"}' in asked("react")
    assert "Finds." not in asked("tools_multi_turn")  # the chat template says it there
