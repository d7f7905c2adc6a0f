"""Scores per set and type, by hand; what an evaluation writes down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.evaluation.config import QuestioningTable
from agent_r1.evaluation.main import answer_line, run_evaluation
from agent_r1_proto.config import RedisTable, RunTable
from agent_r1_proto.evaluation import EvalResult, mean_over_sets, summarise
from agent_r1_proto.rewards import Reward
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ToolCallRecord
from tests.builders import rollout_task, scored


def result(
    set_name: str | None,
    kind: str | None,
    em: float | None,
    *,
    searches: int = 0,
    other_calls: int = 0,
) -> EvalResult:
    """Return a result; `em` None is a failed one."""
    metadata = {"set": set_name, "type": kind}
    task = Task(
        id="q",
        prompt="who?",
        metadata={key: value for key, value in metadata.items() if value is not None},
    )
    rollout = rollout_task(task=task, purpose="eval")
    if em is None:
        return EvalResult(task, scored(rollout, status="FAILED", reason="tool_timeout: search"))
    calls = [ToolCallRecord(end_token_index=4, tool="search", status="ok")] * searches
    calls += [ToolCallRecord(end_token_index=4, tool="search", status="malformed")] * other_calls
    reward = Reward(total=em, components={"exact_match": em, "f1": em / 2}, prediction="Ada")
    return EvalResult(task, scored(rollout, calls=calls).replace(reward=reward))


def test_scores_are_means_per_set_and_type():
    summary = summarise(
        [
            result("hotpot", "bridge", 1.0, searches=2),
            result("hotpot", "bridge", 0.0, searches=1, other_calls=1),
            result("hotpot", "comparison", 1.0),
            result("hotpot", "comparison", None),
            result("wiki", "inference", 0.0, searches=3),
        ]
    )
    hotpot = summary["hotpot"]
    assert (hotpot.n, hotpot.failed) == (3, 1)
    assert hotpot.em == pytest.approx(2 / 3)
    assert hotpot.f1 == pytest.approx(1 / 3)
    assert hotpot.mean_searches == 1.0  # 2 + 1 + 0 over 3; a malformed call searched nothing
    assert hotpot.mean_calls == pytest.approx(4 / 3)
    assert hotpot.types["bridge"].em == 0.5
    assert (hotpot.types["comparison"].n, hotpot.types["comparison"].failed) == (1, 1)
    assert summary["wiki"].em == 0.0
    # The mean over sets weighs sets, not questions.
    assert mean_over_sets(summary, "em", ["hotpot", "wiki"]) == pytest.approx(1 / 3)
    assert mean_over_sets(summary, "em", ["wiki", "unknown"]) == 0.0


def test_a_set_in_which_everything_failed_has_no_score():
    scores = summarise([result("s", "t", None)])["s"]
    assert (scores.n, scores.failed, scores.em, scores.mean_searches) == (0, 1, None, None)
    assert mean_over_sets({"s": scores}, "em", ["s"]) is None


def test_questions_without_a_set_or_type_count_under_all():
    summary = summarise([result(None, None, 1.0)])
    assert summary["all"].types["all"].n == 1


def test_a_missing_component_is_not_a_zero():
    task = Task(id="q", prompt="who?")
    record = scored(rollout_task(task=task)).replace(reward=Reward(total=0.5))
    scores = summarise([EvalResult(task, record)])["all"]
    assert (scores.em, scores.f1, scores.reward) == (None, None, 0.5)


def test_an_answer_is_one_line_of_json():
    line = answer_line(result("s", "t", 1.0, searches=1))
    json.dumps(line, allow_nan=False)
    assert (line["id"], line["set"], line["type"], line["failed"]) == ("q", "s", "t", False)
    assert line["prediction"] == "Ada"
    assert line["components"] == {"exact_match": 1.0, "f1": 0.5}
    assert line["turns"][0]["calls"] == [{"tool": "search", "arguments": {}, "status": "ok"}]


def test_a_failed_question_says_why():
    line = answer_line(result("s", "t", None))
    assert line["failed"]
    assert line["reason"] == "tool_timeout: search"
    missing = answer_line(EvalResult(Task(id="q", prompt="who?"), None))
    assert missing["reason"] == "no result in time"


def test_an_evaluation_without_sets_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"name a file under evaluation\.sets"):
        run_evaluation(
            run=RunTable(),
            redis=RedisTable(url="redis://127.0.0.1:1"),
            sets={},
            questioning=QuestioningTable(),
            out=tmp_path / "out.jsonl",
        )
