"""Two result files side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli import main as cli
from agent_r1.evaluation.answer_file import Answer, CallLine, TurnLine, meta_file
from agent_r1.evaluation.comparison import compare_files, comparison_lines, flip_lines
from agent_r1.evaluation.statistics import Estimate
from tests.unit.evaluation.lines import answer, write


def test_only_common_questions_count_per_set_and_over_all(tmp_path: Path):
    a = [answer(f"q{i}", 1.0 if i < 4 else 0.0) for i in range(10)]
    b = [answer(f"q{i}", 1.0 if 2 <= i < 9 else 0.0, num_calls=2) for i in range(10)]
    a += [answer("x", 1.0, set="t"), answer("only", 1.0), answer("lost", failed=True)]
    b += [answer("x", 1.0, set="t"), answer("lost", 0.0)]
    comparison = compare_files(
        write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", list(reversed(b)))
    )
    assert (comparison.only_a, comparison.only_b, comparison.failed) == (1, 0, 1)
    of_s = comparison.sets["s"]
    assert (of_s.n, of_s.measures["em"].a, of_s.measures["em"].b) == (10, 0.4, 0.7)
    assert of_s.measures["em"].difference.mean == pytest.approx(0.3)
    assert of_s.measures["num_calls"].difference == Estimate(2.0, 2.0, 2.0)
    # Only A: q0, q1; only B: q4 .. q8. 2 * (1 + 7 + 21) / 2^7
    assert of_s.mcnemar is not None
    assert (of_s.mcnemar.only_a, of_s.mcnemar.only_b) == (2, 5)
    assert of_s.mcnemar.p == pytest.approx(58 / 128)
    assert (of_s.failed_a, of_s.failed_b) == (1, 0)
    assert comparison.sets["t"].n == 1
    assert comparison.overall.n == 11


def test_a_file_does_not_differ_from_itself(tmp_path: Path):
    file = write(tmp_path / "a.jsonl", [answer(f"q{i}", float(i % 2)) for i in range(9)])
    overall = compare_files(file, file).overall
    assert {m.difference for m in overall.measures.values()} == {Estimate(0.0, 0.0, 0.0)}
    assert overall.mcnemar is not None
    assert overall.mcnemar.p == 1.0


def test_tasks_without_gold_answers_are_compared_by_reward(tmp_path: Path):
    a = write(tmp_path / "a.jsonl", [answer("q", None, f1=None, substring_match=None, reward=1.0)])
    b = write(tmp_path / "b.jsonl", [answer("q", None, f1=None, substring_match=None, reward=3.0)])
    overall = compare_files(a, b).overall
    assert list(overall.measures) == ["reward", "num_calls"]
    assert overall.measures["reward"].difference.mean == 2.0
    assert overall.mcnemar is None


def test_components_that_a_configuration_names_and_calls_by_tool_are_shown(tmp_path: Path):
    def line(brief: float, calls: int) -> Answer:
        components = {"desk:brief": brief, "format": 1.0}
        turns = [TurnLine(text="", calls=[CallLine(tool="notes", status="ok")] * calls)]
        return answer("q", None, components=components, turns=turns, f1=None, substring_match=None)

    a = write(tmp_path / "a.jsonl", [line(0.25, 1)])
    b = write(tmp_path / "b.jsonl", [line(0.75, 3)])
    meta_file(a).write_text('{"reward.components": {"desk:brief": 1.0}}')
    comparison = compare_files(a, b)
    assert comparison.overall.measures["format"].difference.mean == 0.0
    rows = [text.split() for text in comparison_lines(comparison)[3:]]
    assert [row[1] for row in rows] == ["reward", "num_calls", "desk:brief", "calls/notes"]
    assert rows[2][2:6] == ["1", "0.250", "0.750", "+0.500"]
    assert rows[3][2:6] == ["1", "1.000", "3.000", "+2.000"]


@pytest.mark.parametrize("components", ["{}", '{"exact_match": 1.0}'])
def test_what_the_papers_rule_measures_is_shown(tmp_path: Path, components: str):
    lines = [answer("q", 1.0, components={"exact_match": 1.0, "format": 0.5, "answered": 1.0})]
    file = write(tmp_path / "a.jsonl", lines)
    meta_file(file).write_text(f'{{"reward.rule": "paper", "reward.components": {components}}}')
    rows = [text.split() for text in comparison_lines(compare_files(file, file))[3:]]
    names = ["em", "f1", "substring_match", "reward", "num_calls", "format"]
    assert [row[1] for row in rows] == names


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "the file holds no answer"),
        ("{", r"b\.jsonl:1: Invalid JSON"),
        ('{"method": "agent"}\n', r"b\.jsonl:1: set: Field required"),
        (answer("other").model_dump_json(), "no question in common"),
        (answer("q", failed=True).model_dump_json(), "failed in one of them"),
        (answer("q", question="when?").model_dump_json(), "differs between"),
        (f"{answer('q').model_dump_json()}\n" * 2, r"b\.jsonl:2: question 'q' of set 's' is alr"),
    ],
)
def test_files_that_cannot_be_compared_are_explained(tmp_path: Path, content: str, expected: str):
    a = write(tmp_path / "a.jsonl", [answer("q")])
    b = tmp_path / "b.jsonl"
    b.write_text(content)
    with pytest.raises(ValueError, match=expected):
        compare_files(a, b)


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    a = write(tmp_path / "a.jsonl", [answer(f"q{i}", 0.0, set="st"[i % 2]) for i in range(10)])
    b = write(tmp_path / "b.jsonl", [answer(f"q{i}", 1.0, set="st"[i % 2]) for i in range(10)])
    out = tmp_path / "difference.json"
    assert cli.main(["compare", str(a), str(b), "--out", str(out)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    # 10 of 10 only in B: 2 / 2^10; 5 of 5: 2 / 2^5
    expected = "em 10 0.000 1.000 +1.000 [+1.000, +1.000] p = 0.001953 (only A 0, only B 10)"
    assert f"all sets {expected}" in lines
    assert any(line.startswith("s em 5 ") and "p = 0.0625" in line for line in lines)
    written = json.loads(out.read_text())
    assert written["all"]["mcnemar"] == {"only_a": 0, "only_b": 10, "p": 2 / 1024}
    assert written["sets"]["t"]["measures"]["em"]["difference"]["low"] == 1.0


def test_a_mistake_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("agent-r1: error: ")
    assert "cannot be read: No such file or directory" in error


def test_one_set_is_not_shown_twice(tmp_path: Path):
    file = write(tmp_path / "a.jsonl", [answer("q"), answer("r", failed=True)])
    lines = comparison_lines(compare_files(file, file))
    assert not any("all sets" in line for line in lines)
    assert lines[-2].split() == ["s", "failed", "1", "1"]
    assert lines[-1] == "left out: 1 failed"


def test_a_file_with_several_answers_to_a_question_is_refused(tmp_path: Path):
    a = write(tmp_path / "a.jsonl", [answer("1")])
    b = write(tmp_path / "b.jsonl", [answer("1"), answer("1", attempt=1)])
    with pytest.raises(ValueError, match=r"b\.jsonl has several answers .* without --attempts"):
        compare_files(a, b)


def test_questions_that_flipped_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # A is right at q0 and q1, B at q1 and q2; q3 failed in B and flips nothing.
    a = [answer(f"q{i}", float(i < 2)) for i in range(3)] + [answer("q3", 1.0)]
    b = [answer(f"q{i}", float(i > 0)) for i in range(3)] + [answer("q3", failed=True)]
    files = [str(write(tmp_path / f"{n}.jsonl", one)) for n, one in (("a", a), ("b", b))]
    out = tmp_path / "out.json"
    assert cli.main(["compare", *files, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    first, _, second = text.partition("better in B: 1\n")
    assert "better in A: 1\n  s  q0  em 1 and 0  " in first
    assert second.startswith("  s  q2  em 0 and 1  ")
    flipped = [(one["id"], one["better"]) for one in json.loads(out.read_text())["flipped"]]
    assert flipped == [("q0", "A"), ("q2", "B")]


def test_without_exact_match_the_reward_says_what_flipped_and_a_long_list_is_cut(tmp_path: Path):
    def lines(reward: float) -> list[Answer]:
        none: dict[str, Any] = {"f1": None, "substring_match": None}
        return [answer(f"q{i:02}", None, reward=reward, **none) for i in range(25)]

    a, b = write(tmp_path / "a.jsonl", lines(0.5)), write(tmp_path / "b.jsonl", lines(0.75))
    shown = flip_lines(compare_files(a, b).flips)
    assert shown[0] == "better in B: 25"
    assert shown[1].startswith("  s  q00  reward 0.5 and 0.75  ")
    # 20 of 25 are shown.
    assert len(shown) == 22
    assert shown[-1] == "  and 5 more; --out FILE has all of them"
    assert flip_lines(compare_files(a, a).flips) == []
