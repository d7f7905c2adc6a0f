"""examples/multihop_qa: published and repacked files become tasks and a corpus, strictly."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent_r1.config.run import load_config
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1.tools.search.corpus import read_passages

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "multihop_qa"
MODULES = ("formats", "convert")


@pytest.fixture(scope="module")
def convert() -> Iterator[ModuleType]:
    """The example's script; the short names of its modules are gone afterwards."""
    sys.path.insert(0, str(FOLDER))
    yield [importlib.import_module(name) for name in MODULES][-1]
    sys.path.remove(str(FOLDER))
    for name in MODULES:
        del sys.modules[name]


def hotpot(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "_id": f"q{number}",
        "question": "Which city is X in?",
        "answer": "Paris",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["X", 0]],
        "context": [["X", ["X is a  house. ", "It is in Paris."]], ["Y", ["Y is not."]]],
    } | changes


def wiki(**changes: Any) -> dict[str, Any]:
    return {
        "_id": "w1",
        "question": "Who is the mother of X?",
        "answer": "Zoë",
        "type": "compositional",
        "supporting_facts": [["X", 0]],
        "context": [["X", ["X is the child of Zoë."]]],
        "evidences": [["X", "mother", "Zoë"]],
    } | changes


def musique(**changes: Any) -> dict[str, Any]:
    paragraph = {"idx": 0, "title": "X", "paragraph_text": "X\nhere.", "is_supporting": True}
    return {
        "id": "3hop1__1_2_3",
        "question": "When?",
        "answer": "1999",
        "answer_aliases": ["in 1999", "1999"],
        "answerable": True,
        "paragraphs": [paragraph],
        "question_decomposition": [{"id": 1, "question": "?", "answer": "1999"}],
    } | changes


def write(path: Path, records: list[Any], *, lines: bool = False) -> Path:
    text = "\n".join(map(json.dumps, records)) if lines else json.dumps(records)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def tasks_of(convert: ModuleType, name: str, source: Path, *options: str) -> list[dict[str, Any]]:
    out = source.parent / "tasks.jsonl"
    command = ["tasks", "--set", name, "--source", str(source), "--out", str(out), *options]
    assert convert.main(command) == 0
    return [task.model_dump(exclude_defaults=True) for task in read_task_file(out)]


def test_hotpotqa_questions_become_tasks(convert: ModuleType, tmp_path: Path):
    (task,) = tasks_of(convert, "hotpotqa", write(tmp_path / "dev.json", [hotpot()]))
    assert task == {
        "id": "hotpotqa-q1",
        "prompt": "Which city is X in?",
        "payload": {"answers": ["Paris"]},
        "metadata": {"set": "hotpotqa", "type": "bridge", "level": "hard"},
    }


@pytest.mark.parametrize("as_text", [False, True])
def test_2wikimultihopqa_comes_as_json_or_as_exported_parquet(
    convert: ModuleType, tmp_path: Path, as_text: bool
):
    record = wiki()
    if as_text:  # the parquet files keep nested columns as JSON text
        for key in ("context", "supporting_facts", "evidences"):
            record[key] = json.dumps(record[key])
    (task,) = tasks_of(convert, "2wikimultihopqa", write(tmp_path / "dev.json", [record]))
    assert task["payload"] == {"answers": ["Zoë"]}
    assert task["metadata"] == {"set": "2wikimultihopqa", "type": "compositional"}


def test_musique_aliases_are_answers_and_hops_come_from_the_id(convert: ModuleType, tmp_path: Path):
    source = write(tmp_path / "dev.jsonl", [musique()], lines=True)
    (task,) = tasks_of(convert, "musique", source)
    assert task["payload"] == {"answers": ["1999", "in 1999"]}
    assert task["metadata"] == {"set": "musique", "type": "3hop1", "hops": 3}


def test_paragraphs_become_a_corpus_without_repeats(convert: ModuleType, tmp_path: Path):
    source = write(tmp_path / "dev.json.gz", [hotpot(1), hotpot(2)])
    out = tmp_path / "corpus.jsonl"
    command = ["corpus", "--set", "hotpotqa", "--source", str(source), "--out", str(out)]
    assert convert.main(command) == 0
    passages = list(read_passages(out))
    assert [(p.title, p.text) for p in passages] == [
        ("X", "X is a house. It is in Paris."),
        ("Y", "Y is not."),
    ]
    assert len({p.id for p in passages}) == 2


def test_a_subset_depends_on_seed_and_ids_alone(convert: ModuleType, tmp_path: Path):
    records = [hotpot(number) for number in range(100)]
    forward = write(tmp_path / "a.json", records)
    backward = write(tmp_path / "b.json", records[::-1])

    def chosen(source: Path, seed: str) -> list[str]:
        return [
            task["id"]
            for task in tasks_of(convert, "hotpotqa", source, "--size", "10", "--seed", seed)
        ]

    first = chosen(forward, "1")
    assert len(first) == 10
    assert chosen(backward, "1") == first[::-1]
    assert set(chosen(forward, "2")) != set(first)


@pytest.mark.parametrize(
    ("name", "records", "message"),
    [
        ("hotpotqa", [hotpot(1), hotpot(2, answer="")], "dev.json:1 (record 2): answer: "),
        ("hotpotqa", [hotpot(kind="x")], "(record 1): kind: Extra inputs"),
        ("hotpotqa", [hotpot(1), hotpot(1)], "id 'q1' was used at"),
        ("hotpotqa", [wiki()], "is this the data set that the command names"),
        ("hotpotqa", [7], "a record must be a JSON object; it is 7"),
        ("hotpotqa", [], "the array holds no record"),
        ("2wikimultihopqa", [wiki(context="[broken")], "(record 1): context: "),
        ("musique", [musique(answerable=False)], "(record 1): answerable: "),
        ("musique", [musique(id="x")], "(record 1): id: "),
    ],
)
def test_a_record_that_does_not_fit_is_named(
    convert: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    records: list[Any],
    message: str,
):
    source, out = write(tmp_path / "dev.json", records), tmp_path / "tasks.jsonl"
    command = ["tasks", "--set", name, "--source", str(source), "--out", str(out)]
    assert convert.main(command) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: the file is empty"),
        ("[\n{}, \n{broken]", ":3 (record 2): not JSON"),
        ("[{}", ":1 (record 1): the array is not closed after it"),
        ('{"a": 1}\n\n{}', ":2: the line is empty"),
        ('{"a": 1}\n{"a": }', ":2: not JSON: Expecting value at column 7"),
        ("\udcff", ": line 1: Invalid UTF-8 (0xff at byte"),
    ],
)
def test_a_broken_file_is_named_by_line(
    convert: ModuleType, tmp_path: Path, text: str, message: str
):
    path = tmp_path / "dev.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(convert.SourceError) as caught:
        list(convert.read_records(path))
    assert message in str(caught.value)


def test_a_missing_a_damaged_and_a_too_small_file_are_errors(
    convert: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(convert.SourceError, match="does not exist"):
        list(convert.read_records(tmp_path / "none.json"))
    torn = write(tmp_path / "dev.json.gz", [hotpot()])
    torn.write_bytes(torn.read_bytes()[:-4])
    with pytest.raises(convert.SourceError, match="cannot be read"):
        list(convert.read_records(torn))
    source = write(tmp_path / "dev.json", [hotpot()])
    command = ["tasks", "--set", "hotpotqa", "--source", str(source), "--size", "2"]
    assert convert.main([*command, "--out", str(tmp_path / "tasks.jsonl")]) == 1
    assert "--size (2) must be at most 1" in capsys.readouterr().err


def test_the_real_files_convert_whole(convert: ModuleType, real_data_dir: Path, tmp_path: Path):
    assert convert.main(["repacked", "--data", str(real_data_dir), "--out", str(tmp_path)]) == 0
    # Record counts of the repacked files, as their README lists them.
    counts = {"hotpotqa": (797, 291), "2wikimultihopqa": (500, 565), "musique": (100, 577)}
    for name, (num_train, num_eval) in counts.items():
        train = read_task_file(tmp_path / f"{name}_train.jsonl")
        held_out = read_task_file(tmp_path / f"{name}_eval.jsonl")
        assert (len(train), len(held_out)) == (num_train, num_eval)
        assert not {task.id for task in train} & {task.id for task in held_out}
        assert {str(task.metadata["set"]) for task in [*train, *held_out]} == {name}
        assert all(task.payload["answers"] for task in [*train, *held_out])
    assert sum(1 for _ in read_passages(tmp_path / "corpus.jsonl")) == 15447 + 12050 + 12988
    limited = tmp_path / "limited"
    options = ["--train-size", "20", "--eval-size", "10"]
    command = ["repacked", "--data", str(real_data_dir), "--out", str(limited), *options]
    assert convert.main(command) == 0
    assert len(read_task_file(limited / "hotpotqa_train.jsonl")) == 20
    assert len(read_task_file(limited / "musique_eval.jsonl")) == 10


def test_the_smoke_configuration_is_valid():
    config = load_config(FOLDER / "smoke.toml", environ={}).config
    assert config.data is not None
    assert "search" in config.tools
