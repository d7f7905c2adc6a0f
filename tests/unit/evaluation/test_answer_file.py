"""Result files: what a line holds, and whose answers a file may take over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.answer_file import (
    Answer,
    Facts,
    ResultFile,
    Retrieved,
    differences,
    make_answer,
    meta_file,
    question_of,
    read_answers,
)
from agent_r1.runtime.evaluation_client import EvalResult
from agent_r1_proto.rewards import Reward
from agent_r1_proto.tasks import ChatMessage, Task
from agent_r1_proto.trajectory import DecodingCost, ToolCallRecord
from tests.support.builders import rollout_task, scored
from tests.unit.evaluation.lines import answer

FACTS: Facts = {"method": "agent", "policy": "m", "seed": 0, "temperature": 0.0}


CALLS = [
    ToolCallRecord(end_token_index=4, tool="search", status="ok", arguments={"query": "x"}),
    ToolCallRecord(end_token_index=4, tool="search", status="malformed"),
    ToolCallRecord(end_token_index=4, tool="sum", status="ok"),
]


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "id": "q1",
        "prompt": "who?",
        "payload": {"answers": ["Ada"]},
        "metadata": {"set": "hotpot", "type": "bridge", "hops": 2},
    }
    return Task(**(fields | changes))


def result(of: Task, **changes: Any) -> EvalResult:
    record = scored(rollout_task(task=of, purpose="eval"), policy_version=3, **changes)
    components = {"exact_match": 1.0, "f1": 0.5, "substring_match": 1.0, "format": 0.0}
    if record.reward is None:
        return EvalResult(of, record)
    reward = Reward(total=0.7, components=components, prediction="Ada")
    return EvalResult(of, record.replace(reward=reward))


# --- a line -------------------------------------------------------------------------------------


def test_a_line_holds_question_answer_scores_and_how_it_was_made():
    found = result(task(), calls=CALLS, latency_ms=1500.0)
    line = make_answer(task(), found, "agent").model_dump(mode="json")
    json.dumps(line, allow_nan=False)
    expected = {
        "method": "agent",
        "set": "hotpot",
        "id": "q1",
        "type": "bridge",
        "hops": "2",
        "question": "who?",
        "answers": ["Ada"],
        "prediction": "Ada",
        "em": 1.0,
        "f1": 0.5,
        "substring_match": 1.0,
        "reward": 0.7,
        "components": {"exact_match": 1.0, "f1": 0.5, "substring_match": 1.0, "format": 0.0},
        "num_turns": 1,
        "num_calls": 3,
        "sampled_tokens": 3,
        "seconds": 1.5,
        "calls": {"search": 1, "sum": 1},
        "policy_versions": [3],
        "seed": 1,
        "failed": False,
        "status": "COMPLETED",
        "retrieval": None,
    }
    assert {name: line[name] for name in expected} == expected
    assert line["turns"][0]["calls"][0] == {
        "tool": "search",
        "arguments": {"query": "x"},
        "status": "ok",
    }


def test_a_task_of_another_kind_has_components_and_no_exact_match():
    other = Task(id="t", prompt="sort it", payload={"tests": ["x"]}, metadata={"set": "code"})
    record = scored(rollout_task(task=other)).replace(
        reward=Reward(total=0.5, components={"my_tests:passed": 0.5})
    )
    line = make_answer(other, EvalResult(other, record), "agent")
    assert (line.em, line.f1, line.answers, line.type, line.hops) == (None,) * 5
    assert (line.reward, line.components) == (0.5, {"my_tests:passed": 0.5})


def test_a_line_holds_what_the_answer_has_cost():
    cost = DecodingCost(sampled_tokens=90, calls=7, replayed_calls=1, scores=6, scorer_tokens=400)
    cost = cost.model_copy(update={"places": 2})
    line = make_answer(task(), result(task(), calls=CALLS, decoding=cost), "agent")
    # Of the three calls of the chosen branch, tools have answered two.
    assert (line.sampled_tokens, line.scorer_tokens, line.scores) == (90, 400, 6)
    assert (line.discarded_calls, line.replayed_calls) == (5, 1)
    assert (line.places, line.searched) == (2, 1.0)
    alone = result(task(), decoding=cost.model_copy(update={"places": 0}))
    assert make_answer(task(), alone, "agent").searched == 0.0
    plain = make_answer(task(), result(task(), calls=CALLS), "agent")
    assert (plain.sampled_tokens, plain.scorer_tokens, plain.discarded_calls) == (3, None, None)
    assert (plain.places, plain.searched) == (None, None)


@pytest.mark.parametrize("missing", [True, False])
def test_a_failed_question_says_why_and_has_no_score(missing: bool):
    if missing:
        found, reason = EvalResult(task(), None), "no result in time"
    else:
        found = result(task(), status="FAILED", reason="tool_timeout: search")
        reason = "tool_timeout: search"
    line = make_answer(task(), found, "agent")
    assert (line.failed, line.reason, line.em, line.reward) == (True, reason, None, None)


def test_a_line_comes_back_as_it_was_written(tmp_path: Path):
    retrieved = Retrieved(query="who?", status="ok", text="Ada.\u2028\n…", version="7")
    line = make_answer(task(), result(task()), "naive_rag", retrieved)
    path = tmp_path / "a.jsonl"
    path.write_bytes(line.model_dump_json().encode() + b"\n")
    assert read_answers(path) == [line]


def test_a_line_of_an_older_version_is_read(tmp_path: Path):
    line = make_answer(task(), result(task(), calls=CALLS), "agent")
    older = line.model_dump(mode="json", exclude={"calls"}) | {"num_searches": 1}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(older) + "\n")
    (read,) = read_answers(path)
    assert read == line
    assert read.calls == {"search": 1, "sum": 1}


def test_the_question_is_the_users_last_message():
    said = [("user", "Hello"), ("assistant", "Yes?"), ("user", "who?")]
    dialogue = [ChatMessage.model_validate({"role": r, "content": c}) for r, c in said]
    assert question_of(Task(id="q", prompt=dialogue)) == "who?"
    only = [ChatMessage(role="assistant", content="x"), ChatMessage(role="tool", content="y")]
    with pytest.raises(ValueError, match="'q' has no message of role 'user'"):
        question_of(Task(id="q", prompt=only))


# --- going on with a file -----------------------------------------------------------------------


def begun(out: Path, *answers: Answer, facts: Facts = FACTS) -> Path:
    file = ResultFile(out, facts)
    for line in answers:
        file.append(line)
    return out


def test_a_file_is_taken_over_by_the_same_evaluation(tmp_path: Path):
    out = begun(tmp_path / "new" / "a.jsonl", answer("q1"), answer("q2", set="t"))
    file = ResultFile(out, FACTS)
    assert file.answers.keys() == {("s", "q1", 0), ("t", "q2", 0)}
    assert file.notes == []
    file.append(answer("q3"))
    assert [line.id for line in read_answers(out)] == ["q1", "q2", "q3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "naive_rag"}, 'method is "agent" there and "naive_rag" here'),
        ({"policy": "other"}, 'policy is "m" there and "other" here'),
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"temperature": 1.0}, r"temperature is 0\.0 there and 1\.0 here"),
        ({"sets.x": "sha256:0"}, 'sets.x is not set there and "sha256:0" here'),
    ],
)
def test_a_file_of_another_evaluation_is_refused(tmp_path: Path, change: Any, message: str):
    out = begun(tmp_path / "a.jsonl", answer())
    before = out.read_bytes()
    with pytest.raises(ValueError, match=f"{message}; choose another --out, or use --overwrite"):
        ResultFile(out, {**FACTS, **change})
    assert out.read_bytes() == before


def test_a_file_that_nobody_knows_is_refused(tmp_path: Path):
    out = begun(tmp_path / "a.jsonl", answer())
    meta_file(out).write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ResultFile(out, FACTS)
    meta_file(out).unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl\.meta\.json, which says what its answers"):
        ResultFile(out, FACTS)


def test_overwrite_begins_again(tmp_path: Path):
    out = begun(tmp_path / "a.jsonl", answer())
    changed = {**FACTS, "seed": 5}
    assert ResultFile(out, changed, overwrite=True).answers == {}
    assert not out.exists()
    assert json.loads(meta_file(out).read_text())["seed"] == 5


def test_a_full_disk_is_explained(tmp_path: Path):
    file = ResultFile(tmp_path / "a.jsonl", FACTS)
    file.out.symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"cannot be written: No space left on device"):
        file.append(answer())
    assert file.answers == {}


@pytest.mark.parametrize("cut", [1, 40])
def test_a_half_written_last_line_is_dropped_with_a_note(tmp_path: Path, cut: int):
    # cut = 1 leaves valid JSON without its newline, which may as well lack more.
    out = begun(tmp_path / "a.jsonl", answer("q1"), answer("q2"))
    out.write_bytes(out.read_bytes()[:-cut])
    file = ResultFile(out, FACTS)
    assert file.answers.keys() == {("s", "q1", 0)}
    assert "only half written" in file.notes[0]
    file.append(answer("q2"))
    assert [line.id for line in read_answers(out)] == ["q1", "q2"]


def test_a_malformed_line_in_the_middle_is_an_error(tmp_path: Path):
    out = begun(tmp_path / "a.jsonl", answer("q1"), answer("q2"))
    lines = out.read_text().splitlines()
    out.write_text("\n".join([lines[0], "{}", lines[1]]) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: method: Field required"):
        ResultFile(out, FACTS)


def test_failed_questions_come_again(tmp_path: Path):
    out = begun(tmp_path / "a.jsonl", answer("q1"), answer("q2", failed=True))
    file = ResultFile(out, FACTS)
    assert file.answers.keys() == {("s", "q1", 0)}
    assert "1 failed questions will be asked again" in file.notes[0]
    assert [line.id for line in read_answers(out)] == ["q1"]


def test_differences_are_cut_to_a_readable_length():
    (line,) = differences({"env.system_prompt": "x" * 500}, {"env.system_prompt": "y"})
    assert len(line) < 150
    assert line.endswith('and "y" here')
