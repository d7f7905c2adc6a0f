"""Cells and the report of a matrix: numbers worked out by hand, files, tables, picture."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.answer_file import CallLine, TurnLine, differences
from agent_r1.evaluation.experiments.cell import MatrixCell, check_settings, measure
from agent_r1.evaluation.experiments.config import ComparisonEntry, MatrixFile
from agent_r1.evaluation.experiments.contrasts import compare
from agent_r1.evaluation.experiments.data_sets import CODE, MATHS, MULTIHOP
from agent_r1.evaluation.experiments.matrix_report import (
    CellKey,
    MatrixResults,
    finished,
    report,
    trade_off,
)
from tests.unit.evaluation.lines import answer

ROOT = Path(__file__).resolve().parents[4]
CALLS = [
    CallLine(tool="search", status="ok"),
    CallLine(tool="search", status="error"),
    CallLine(tool="find", status="unknown_tool"),
]
SETTINGS = {"seed": 0, "temperature": 0.0}


def cell(score: float, tokens: float = 10.0, seconds: float = 1.0, **changes: Any) -> MatrixCell:
    fields: dict[str, Any] = {
        "settings": SETTINGS,
        "n": 4,
        "failed": 0,
        "score": (score, score - 0.1, score + 0.1),
        "extra": (score, score, score),
        "sampled_tokens": (tokens, tokens, tokens),
        "calls": (1.5, 1.0, 2.0),
        "seconds": (seconds, seconds, seconds),
    }
    return MatrixCell(**(fields | changes))


def test_a_cell_has_means_over_the_questions_that_were_scored():
    answers = [
        answer("1", 1.0, components={"exact_match": 1.0, "f1": 1.0}, sampled_tokens=10, seconds=1),
        answer(
            "2",
            0.0,
            components={"exact_match": 0.0, "f1": 0.5},
            sampled_tokens=30,
            turns=[TurnLine(text="", calls=CALLS)],
            num_calls=3,
            discarded_calls=4,
            seconds=3,
        ),
        answer("3", failed=True),
    ]
    found = measure(answers, MULTIHOP, SETTINGS)
    assert (found.n, found.failed) == (2, 1)
    assert found.score[0] == 0.5
    assert found.extra is not None
    assert found.extra[0] == 0.75
    # (10 + 30) / 2 tokens, (0 + 2 + 4) / 2 answered calls, (1 + 3) / 2 seconds
    assert (found.sampled_tokens[0], found.calls[0], found.seconds[0]) == (20.0, 3.0, 2.0)
    assert found == measure(list(reversed(answers)), MULTIHOP, SETTINGS)
    assert found.scores == {"1": 1.0, "2": 0.0}


def test_mathematics_and_programs_are_scored_by_their_own_components():
    maths = answer("1", 0.0, components={"exact_match": 0.0, "f1": 0.0, "math_equal": 1.0})
    assert measure([maths], MATHS, SETTINGS).score == (1.0, 1.0, 1.0)
    program = answer("1", None, components={"all_tests_passed": 0.0, "tests_passed": 0.25})
    found = measure([program], CODE, SETTINGS)
    assert (found.score[0], found.extra) == (0.0, (0.25, 0.25, 0.25))


def test_a_cell_without_a_scored_question_is_none():
    with pytest.raises(ValueError, match="all 1 questions failed"):
        measure([answer("1", failed=True)], MULTIHOP, SETTINGS)


def test_a_finished_cell_is_read_only_under_its_own_settings(tmp_path: Path):
    file = tmp_path / "cells" / "one.json"
    assert MatrixCell.read(file) is None
    cell(0.5).write(file)
    assert MatrixCell.read(file) == cell(0.5)
    with pytest.raises(ValueError, match=r"seed is 0 there and 1 here.*--overwrite"):
        check_settings(file, differences(SETTINGS, {**SETTINGS, "seed": 1}), "--overwrite")
    file.write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        MatrixCell.read(file)


def results(cells: Mapping[CellKey, MatrixCell | str] | None = None, **said: Any) -> MatrixResults:
    matrix = {
        "config": "run.toml",
        "results": "small",
        "tasks": {"own": "own.jsonl"},
        "models": [{"name": "base", "policy": "owner/base"}],
    }
    usual: dict[CellKey, MatrixCell | str] = {
        CellKey("base", "math500", "direct", "greedy"): "no data: not named; get it",
        CellKey("base", "gsm8k", "direct", "greedy"): cell(0.25, 12, extra=None),
        CellKey("base", "hotpotqa", "direct", "greedy"): cell(0.5, 100, 2.0, failed=1),
        CellKey("base", "hotpotqa", "react", "greedy"): "no tool: add it",
    }
    return MatrixResults(
        name="small",
        matrix=MatrixFile.model_validate(matrix | said),
        cells=cells or usual,
        command="agent-r1 matrix small.toml",
        versions={"Python": "3.11"},
    )


def test_a_search_is_told_from_one_that_had_nothing_to_choose_from(tmp_path: Path):
    right = {"math_equal": 1.0}
    asked = [
        # A scorer that remembers its answer to an equal question takes no tokens for it.
        answer(str(number), components=right, scorer_tokens=tokens, scores=scores, places=1)
        for number, (tokens, scores) in enumerate(((9, 2), (0, 0), (0, 1), (9, 4)))
    ]
    plain_ones = [answer("1", components=right)]
    searched, plain = (measure(them, MATHS, SETTINGS) for them in (asked, plain_ones))
    assert (searched.scored_share, plain.scored_share) == (0.75, None)  # three of four
    place = CellKey("base", "math500", "react", "guided")
    (file, *_) = results(cells={place: searched}).write(tmp_path / "guided")
    assert "| tokens | scorer tokens | scored | searched | calls |" in file.read_text()
    assert "| 4 | 75% | 100% |" in file.read_text()  # (9 + 0 + 0 + 9) / 4 tokens, rounded to even
    (file, *_) = results(cells={place: plain}).write(tmp_path / "plain")
    assert "a scorer was asked" not in file.read_text()
    assert "had at least two" not in file.read_text()
    assert "| tokens | calls |" in file.read_text()


def test_a_search_without_a_scorer_says_of_how_many_questions_it_searched(tmp_path: Path):
    right = {"math_equal": 1.0}
    asked = [
        answer(str(number), components=right, scorer_tokens=0, scores=0, places=places)
        for number, places in enumerate((3, 0, 1, 1))
    ]
    searched = measure(asked, MATHS, SETTINGS)
    assert (searched.scored_share, searched.searched_share) == (0.0, 0.75)  # three of four
    older = searched.model_copy(update={"searched_share": None})  # which did not count
    cells = {
        CellKey("base", "math500", "react", "new"): searched,
        CellKey("base", "math500", "react", "old"): older,
    }
    (file, *_) = results(cells=cells).write(tmp_path / "guided")
    assert "| tokens | scorer tokens | scored | searched | calls |" in file.read_text()
    assert "| 0 | 0% | 75% | 0.0 |" in file.read_text()
    assert "| 0 | 0% |  | 0.0 |" in file.read_text()
    assert "at least two different candidates" in file.read_text()


def test_the_report_has_a_table_for_each_set_and_says_what_is_missing(tmp_path: Path):
    files = results().write(tmp_path / "out" / "small")
    assert [file.name for file in files] == ["small.md", "small.json", "small.svg"]
    text = files[0].read_text()
    assert "## MATH-500\n\nno data: not named; get it." in text
    assert (
        "| base | direct | greedy | 0.500 [0.400, 0.600] | 0.500 [0.500, 0.500] "
        "| 100 | 1.5 | 2.00 | 4 (1 failed) |"
    ) in text
    assert "| base | direct | greedy | 0.250 [0.150, 0.350] | 12 | 1.5 | 1.00 | 4 |" in text
    assert "| base | react | greedy | no tool: add it |  |" in text
    assert "agent-r1 matrix small.toml" in text
    assert "Models: `base` is owner/base." in text
    # The text comes from the numbers beside it alone.
    assert report(json.loads(files[1].read_text())) == text
    widths = {line.count("|") for line in text.split("## HotpotQA")[1].split("##")[0].splitlines()}
    assert widths == {0, 10}  # nine columns in every row


def test_points_are_means_over_the_sets_of_a_kind_that_every_way_has():
    cells: dict[CellKey, MatrixCell | str] = {
        CellKey("base", "hotpotqa", "direct", "greedy"): cell(0.2, 10, 1.0),
        CellKey("base", "musique", "direct", "greedy"): cell(0.4, 30, 2.0),
        CellKey("base", "hotpotqa", "react", "greedy"): cell(0.9, 50, 3.0),
        CellKey("base", "musique", "react", "greedy"): "not run",
        CellKey("base", "gsm8k", "direct", "greedy"): cell(0.7),
    }
    shown = {
        (panel.title, panel.x_label): [(one.name, *one.points) for one in panel.series]
        for row in trade_off(cells)
        for panel in row
    }
    # (0.2 + 0.4) / 2, (10 + 30) / 2, (1 + 2) / 2; react has no MuSiQue.
    score, name = pytest.approx(0.3), "direct: base, greedy"
    assert shown == {
        ("questions", "tokens a question"): [(name, (20.0, score))],
        ("questions", "seconds a question"): [(name, (1.5, score))],
        ("mathematics", "tokens a question"): [(name, (10.0, 0.7))],
        ("mathematics", "seconds a question"): [(name, (1.0, 0.7))],
    }


def test_the_picture_has_every_point_against_both_costs(tmp_path: Path):
    cells = {
        CellKey(model, "gsm8k", method, "greedy"): cell(0.5, extra=None)
        for model in ("base", "trained")
        for method in ("direct", "react")
    }
    results(cells=cells).write(tmp_path / "small")
    text = (tmp_path / "small.svg").read_text()
    ET.fromstring(text)
    for way in ("direct: base", "react: base", "direct: trained", "react: trained"):
        assert text.count(f">{way}, greedy</text>") == 1
    for label in ("tokens a question", "seconds a question", "mathematics"):
        assert f">{label}</text>" in text


def test_a_report_without_matplotlib_is_whole_and_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn = results().write(tmp_path / "drawn")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = results().write(tmp_path / "small")
    assert [file.suffix for file in drawn] == [".md", ".json", ".svg"]
    assert [file.suffix for file in files] == [".md", ".json"]
    text = files[0].read_text()
    assert "`pip install 'agent-r1[plots]'`" in text
    assert "![" not in text
    assert report(json.loads(files[1].read_text())) == text
    assert text.split("## MATH-500")[1] == drawn[0].read_text().split("## MATH-500")[1]


def test_no_picture_is_drawn_of_nothing(tmp_path: Path):
    cells = {CellKey("base", "gsm8k", "direct", "greedy"): "not run"}
    files = results(cells=cells).write(tmp_path / "small")
    assert [file.name for file in files] == ["small.md", "small.json"]


def test_cells_of_an_older_version_are_shown_and_said_not_to_be_paired(tmp_path: Path):
    places = {way: CellKey("base", "own", "as_they_are", way) for way in ("greedy", "best")}
    compared = {"name": "primary", "first": "greedy", "second": "best", "sets": ["own"]}
    said = {
        "decode": [{"method": "greedy"}, {"method": "majority", "name": "best"}],
        "comparisons": [{**compared, "goal": "better", "margin": 0.1}],
    }
    known = cell(0.5, extra=None, scores={"a": 1.0, "b": 0.0})
    old = cell(0.25, extra=None)
    cells = {places["greedy"]: old, places["best"]: known}
    files = results(cells, **said).write(tmp_path / "small")
    text = files[0].read_text()
    assert "keep no score of each question: base: greedy. Remove their files" in text
    assert "| base | as_they_are | greedy | 0.250 [0.150, 0.350] |" in text
    assert "Cells of an older version keep no score of each question: greedy." in text
    assert json.loads(files[1].read_text())["comparisons"][0]["reached"] is None
    cells[places["greedy"]] = known
    files = results(cells, **said).write(tmp_path / "small")
    assert "older version" not in files[0].read_text()


def test_a_comparison_says_from_how_many_answers_was_chosen_where_any_were(tmp_path: Path):
    said = {
        "decode": [{"method": "greedy"}, {"method": "majority"}, {"method": "fitted"}],
        "models": [{"name": name, "policy": f"owner/{name}"} for name in ("a", "b")],
        "comparisons": [
            {"first": first, "second": "fitted", "name": first, "goal": "better", "margin": 0.1}
            | {"sets": ["own"]}
            for first in ("greedy", "majority_4")
        ],
        "remarks": "The second comparison came later.",
    }
    known = cell(0.5, extra=None, scores={"a": 1.0, "b": 0.0})
    voted = known.model_copy(update={"candidates": 3})
    ways = {"greedy": known, "majority_4": voted, "fitted": known}
    cells = {
        CellKey(model, "own", "as_they_are", way): of
        for model in ("a", "b")
        for way, of in ways.items()
    }
    (file, *_) = results(cells, **said).write(tmp_path / "small")
    of_all = [line for line in file.read_text().splitlines() if line.startswith("| all models")]
    difference = "+0.000 [+0.000, +0.000]"
    assert of_all == [
        f"| all models |  | 0.500 | 0.500 | {difference} | {chosen} | 10 | 10 | 2 |"
        for chosen in ("", "3, 3")
    ]
    assert "The second comparison came later." in file.read_text()


MATRICES = [
    file
    for file in sorted((ROOT / "docs" / "results").rglob("*.json"))
    if "comparisons" in json.loads(file.read_text())
]


@pytest.mark.parametrize("file", MATRICES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_committed_page_is_what_its_cells_give(file: Path):
    found = json.loads(file.read_text())
    assert report(found) == file.with_suffix(".md").read_text()
    cells: dict[CellKey, MatrixCell | str] = {}
    for one in found["cells"]:
        key = CellKey(*(one[name] for name in ("model", "set", "method", "decode")))
        committed = file.with_name(f"{file.stem}_cells") / f"{key.name}.json"
        cells[key] = MatrixCell.read(committed) or one["missing"]
    for one in found["comparisons"]:
        entry = {name: one[name] for name in ComparisonEntry.model_fields if name in one}
        again = ComparisonEntry.model_validate({**entry, "sets": [one["set"]]})
        assert compare(again, one["set"], finished(cells, one["set"])) == one
