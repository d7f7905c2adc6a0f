"""Scores per set, type and number of hops, by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_r1.evaluation.answer_file import Answer, CallLine, TurnLine
from agent_r1.evaluation.score_names import ScoreNames
from agent_r1.evaluation.statistics import Estimate, bootstrap_mean
from agent_r1.evaluation.summary import summarise_answers, summary_lines, summary_record
from agent_r1.runtime.evaluation_client import (
    ATTEMPT,
    EvalResult,
    SetScores,
    mean_over_sets,
    means_over_sets,
    question_seed,
    summarise,
)
from agent_r1_proto.rewards import Reward
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import rollout_task, scored
from tests.unit.evaluation.lines import answer

# --- of result files ----------------------------------------------------------------------------


def mean(estimate: Estimate | None) -> float:
    assert estimate is not None
    assert estimate.low <= estimate.mean <= estimate.high
    return estimate.mean


ANSWERS = [
    answer("1", 1.0, type="bridge", hops="2", num_calls=2),
    answer("2", 0.0, type="bridge", hops="3", num_calls=1),
    answer("3", 1.0, type="comparison", hops="2"),
    answer("4", failed=True, type="comparison", hops="2"),
    answer("1", 0.0, set="wiki"),
]


def test_answers_are_averaged_per_set_type_and_hops():
    summary = summarise_answers(ANSWERS)
    s = summary["s"]
    assert (s.n, s.failed) == (3, 1)
    assert mean(s.measures["em"]) == pytest.approx(2 / 3)
    assert mean(s.measures["num_calls"]) == 1.0
    assert mean(s.components["exact_match"]) == pytest.approx(2 / 3)
    assert mean(s.types["bridge"].measures["em"]) == 0.5
    assert (s.types["comparison"].n, s.types["comparison"].failed) == (1, 1)
    assert {hops: scores.n for hops, scores in s.hops.items()} == {"2": 2, "3": 1}
    assert mean(s.hops["2"].measures["em"]) == 1.0
    wiki = summary["wiki"]
    assert (wiki.n, wiki.types, wiki.hops) == (1, {}, {})


def test_several_attempts_at_a_question_are_averaged_first():
    # "1" right in 1 of 4, "2" in 4 of 4, "3" never.
    outcomes = {"1": [1.0, 0.0, 0.0, 0.0], "2": [1.0] * 4, "3": [0.0] * 4}
    lines = [
        answer(name, em, attempt=i) for name, ems in outcomes.items() for i, em in enumerate(ems)
    ]
    s = summarise_answers(lines)["s"]
    assert s.n == 12
    # (1/4 + 1 + 0) / 3; the interval is that of three questions, not of twelve answers.
    assert mean(s.measures["em"]) == pytest.approx(5 / 12)
    assert s.measures["em"] == bootstrap_mean([0.25, 1.0, 0.0])
    # One of 2 of the first question: 1 - C(3,2)/C(4,2) = 1/2; one of 4: certain.
    rates = {k: mean(rate) for k, rate in s.pass_at.items()}
    assert rates == {"1": pytest.approx(5 / 12), "2": pytest.approx(1.5 / 3), "4": 2 / 3}
    # Each of 2 of the first question: C(1,2) = 0.
    rates = {k: mean(rate) for k, rate in s.pass_all.items()}
    assert rates == {
        "1": pytest.approx(5 / 12),
        "2": pytest.approx(1 / 3),
        "4": pytest.approx(1 / 3),
    }
    (line,) = summary_lines({"s": s}, ScoreNames((), ()))
    assert "pass@4 0.667" in line
    assert "pass^4 0.333" in line


def test_a_task_of_another_kind_passes_by_its_own_component():
    lines = [answer("1", None, components={"math_equal": 1.0}, attempt=i) for i in range(2)]
    assert mean(summarise_answers(lines)["s"].pass_all["2"]) == 1.0
    unknown = [answer("1", None, components={"style": 1.0}, attempt=i) for i in range(2)]
    assert summarise_answers(unknown)["s"].pass_at == {}


@pytest.mark.parametrize(
    ("components", "rate"),
    [
        ({"task:correct": 1.0, "format": 0.0}, 1.0),
        ({"task:correct": 0.5}, 0.0),  # not all of it
        ({"exact_match": 0.0, "task:correct": 1.0}, 0.0),
        ({"task:correct": 1.0, "task:short": 1.0}, None),  # which of the two is not said
    ],
)
def test_the_only_component_of_the_users_own_says_what_is_right(
    components: dict[str, float], rate: float | None
):
    answers = [answer(attempt=i, em=None, components=components) for i in range(2)]
    found = summarise_answers(answers)["s"].pass_at
    assert (mean(found["2"]) if found else None) == rate


def test_mathematics_decides_over_the_same_text_where_it_is_asked_for():
    # Both answers equal the gold one as mathematics, and neither is its text.
    lines = [
        answer("1", 0.0, components={"exact_match": 0.0, "math_equal": 1.0}, attempt=i)
        for i in range(2)
    ]
    scores = summarise_answers(lines)["s"]
    assert mean(scores.pass_at["2"]) == 1.0
    assert mean(scores.chosen["majority"]) == 1.0


def test_one_answer_a_question_has_no_pass_rates():
    assert summarise_answers(ANSWERS)["s"].pass_at == {}
    assert summarise_answers(ANSWERS)["s"].chosen == {}


def test_the_most_frequent_answer_and_the_best_by_a_scorer_are_chosen():
    def said(name: str, *attempts: tuple[str | None, float, float]) -> list[Answer]:
        return [
            answer(
                name,
                em,
                prediction=text,
                attempt=i,
                components={"exact_match": em, "reward_model": score},
            )
            for i, (text, em, score) in enumerate(attempts)
        ]

    lines = [
        *said("1", ("Bern", 0.0, 0.2), ("Oslo", 1.0, 0.4), ("oslo ", 1.0, 0.3)),
        # Two and two: the first of those that are said most.
        *said("2", ("Rome", 0.0, 0.9), ("Nice", 1.0, 0.1), ("Nice", 1.0, 0.2), ("Rome", 0.0, 0.3)),
        # Answers that are none do not vote.
        *said("3", (None, 0.0, 0.1), (None, 0.0, 0.1), ("Kyiv", 1.0, 0.8)),
    ]
    s = summarise_answers(lines)["s"]
    # Majority: Oslo right, Rome wrong, Kyiv right. Best: Oslo, Rome (0.9) wrong, Kyiv.
    assert {name: mean(share) for name, share in s.chosen.items()} == {
        "majority": pytest.approx(2 / 3),
        "reward_model": pytest.approx(2 / 3),
    }
    (line,) = summary_lines({"s": s}, ScoreNames((), ()))
    assert "majority 0.667" in line
    assert "best by reward_model 0.667" in line


def test_what_answers_have_cost_is_averaged_and_shown_of_a_search():
    lines = [
        answer("1", sampled_tokens=100, scorer_tokens=40, discarded_calls=3, replayed_calls=0),
        answer("2", sampled_tokens=300, scorer_tokens=80, discarded_calls=4, replayed_calls=1),
    ]
    _, line = summary_lines(summarise_answers(lines), ScoreNames((), ()))
    shown = (
        "  cost of an answer",
        "sampled tokens 200.000",
        "scorer tokens 60.000",
        "discarded calls 3.500",
    )
    for said in (*shown, "replayed calls 0.500"):
        assert said in line
    assert "searched" not in line  # nobody counted
    plain = summarise_answers([answer("1", sampled_tokens=100)])
    assert mean(plain["s"].measures["sampled_tokens"]) == 100.0
    assert plain["s"].measures["scorer_tokens"] is None
    (alone,) = summary_lines(plain, ScoreNames((), ()))
    assert "tokens" not in alone


def test_how_many_questions_were_searched_is_shown():
    lines = [
        answer(str(number), scorer_tokens=0, places=places)
        for number, places in enumerate((3, 0, 1, 1))
    ]
    _, line = summary_lines(summarise_answers(lines), ScoreNames((), ()))
    assert "states with a choice 1.250" in line  # (3 + 0 + 1 + 1) / 4
    assert "questions searched 0.750" in line
    assert "sampled tokens" not in line


def test_the_order_of_the_lines_does_not_matter():
    many = [answer(f"q{i}", float(i % 3 == 0), num_calls=i) for i in range(40)]
    assert summarise_answers(many) == summarise_answers(list(reversed(many)))


def test_a_set_in_which_everything_failed_has_no_score():
    (scores,) = summarise_answers([answer("1", failed=True)]).values()
    assert (scores.n, scores.failed, scores.measures["em"]) == (0, 1, None)
    assert scores.components == {}


def test_the_record_says_what_was_asked_of_whom_and_is_json():
    facts = {"method": "naive_rag", "policy": "m", "seed": 3, "temperature": 0.0, "top_k": 2}
    record = summary_record({**facts, "env.max_turns": 5}, summarise_answers(ANSWERS))
    json.dumps(record, allow_nan=False)
    assert {name: record[name] for name in facts} == facts
    assert record["interval"]["resamples"] == 10_000
    s = record["sets"]["s"]
    assert (s["n"], s["failed"], s["em"]["mean"]) == (3, 1, pytest.approx(2 / 3))
    assert s["em"]["low"] < s["em"]["mean"] < s["em"]["high"]
    assert s["types"]["bridge"]["n"] == 2
    assert s["hops"]["3"]["em"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_lines_show_the_reward_the_named_components_and_the_tools():
    names = ScoreNames(("exact_match",), ("search",))
    shown = summary_lines(summarise_answers(ANSWERS), names)
    assert shown[0].startswith("s ")
    assert "reward 0.667 [" in shown[0]
    assert "EM 0.667 [" in shown[0]
    assert "search 0.000 [0.000, 0.000]  n 3  failed 1" in shown[0]
    assert [line.split()[0] for line in shown[1:5]] == ["bridge", "comparison", "2", "3"]


def test_a_task_of_another_kind_shows_no_exact_match():
    calls = [CallLine(tool="notes", status="ok")] * 2 + [CallLine(tool="notes", status="failed")]
    other = answer(
        "1",
        None,
        reward=0.25,
        components={"desk:brief": 0.5, "format": 1.0},
        turns=[TurnLine(text="", calls=calls)],
    )
    scores = summarise_answers([other])
    (line,) = summary_lines(scores, ScoreNames(("desk:brief",), ("notes", "clock")))
    assert line.split()[1:] == [
        *("reward", "0.250", "[0.250,", "0.250]"),
        *("brief", "0.500", "[0.500,", "0.500]"),
        *("notes", "2.000", "[2.000,", "2.000]"),
        *("clock", "0.000", "[0.000,", "0.000]"),
        *("n", "1"),
    ]
    record = summary_record({}, scores)["sets"]["s"]
    assert record["components"]["format"]["mean"] == 1.0
    assert record["calls"]["notes"]["mean"] == 2.0


# --- of an evaluation during training -----------------------------------------------------------


def result(
    set_name: str | None,
    kind: str | None,
    em: float | None,
    *,
    searches: int = 0,
    malformed: int = 0,
    sums: int = 0,
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
    calls += [ToolCallRecord(end_token_index=4, tool="search", status="malformed")] * malformed
    calls += [ToolCallRecord(end_token_index=4, tool="sum", status="error")] * sums
    reward = Reward(total=em, components={"exact_match": em, "f1": em / 2}, prediction="Ada")
    return EvalResult(task, scored(rollout, calls=calls).replace(reward=reward))


def test_scores_are_means_per_set_and_type():
    summary = summarise(
        [
            result("hotpot", "bridge", 1.0, searches=2),
            result("hotpot", "bridge", 0.0, searches=1, malformed=1),
            result("hotpot", "comparison", 1.0),
            result("hotpot", "comparison", None),
            result("wiki", "inference", 0.0, searches=3, sums=2),
        ]
    )
    hotpot = summary["hotpot"]
    assert (hotpot.n, hotpot.failed) == (3, 1)
    assert hotpot.em == pytest.approx(2 / 3)
    assert hotpot.f1 == pytest.approx(1 / 3)
    # 2 + 1 + 0 searches over 3 questions; a malformed call reached nothing.
    assert hotpot.calls == {"search": 1.0, "sum": 0.0}
    assert summary["wiki"].calls == {"search": 3.0, "sum": 2.0}
    assert means_over_sets(summary, "calls", ["hotpot", "wiki"]) == {"search": 2.0, "sum": 1.0}
    assert hotpot.components == {"exact_match": pytest.approx(2 / 3), "f1": pytest.approx(1 / 3)}
    assert hotpot.mean_calls == pytest.approx(4 / 3)
    assert hotpot.types["bridge"].em == 0.5
    assert (hotpot.types["comparison"].n, hotpot.types["comparison"].failed) == (1, 1)
    assert summary["wiki"].em == 0.0
    # The mean over sets weighs sets, not questions.
    assert mean_over_sets(summary, "em", ["hotpot", "wiki"]) == pytest.approx(1 / 3)
    assert mean_over_sets(summary, "em", ["wiki", "unknown"]) == 0.0


def test_a_training_set_in_which_everything_failed_has_no_score():
    scores = summarise([result("s", "t", None)])["s"]
    assert (scores.n, scores.failed, scores.em, scores.reward) == (0, 1, None, None)
    assert (scores.components, scores.calls) == ({}, {})
    assert mean_over_sets({"s": scores}, "em", ["s"]) is None


def test_scores_of_an_older_checkpoint_are_read():
    older = {
        **{"n": 2, "failed": 0, "em": 0.5, "f1": 0.5, "reward": 0.5},
        **{"mean_searches": 1.5, "mean_calls": 2.0},
    }
    scores = SetScores.model_validate(older | {"types": {"bridge": older}})
    assert scores.calls == scores.types["bridge"].calls == {"search": 1.5}


def test_questions_without_a_set_or_type_count_under_all():
    summary = summarise([result(None, None, 1.0)])
    assert summary["all"].types["all"].n == 1


def test_a_missing_component_is_not_a_zero():
    task = Task(id="q", prompt="who?")
    record = scored(rollout_task(task=task)).replace(reward=Reward(total=0.5))
    scores = summarise([EvalResult(task, record)])["all"]
    assert (scores.em, scores.f1, scores.reward) == (None, None, 0.5)


def test_the_seed_of_a_question_depends_on_set_id_and_attempt_alone():
    def seed(base: int, **changes: Any) -> int:
        fields: dict[str, Any] = {"id": "q", "prompt": "who?", "metadata": {"set": "s"}}
        return question_seed(base, Task(**(fields | changes)))

    assert seed(1) == seed(1, prompt="other", metadata={"set": "s", "type": "x"})
    assert 0 <= seed(1) < 2**63
    again = {"set": "s", ATTEMPT: 1}
    others = (seed(2), seed(1, id="r"), seed(1, metadata={"set": "t"}), seed(1, metadata=again))
    assert len({seed(1), *others}) == 5
