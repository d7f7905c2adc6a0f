"""The numbers of a results table, and the files made of them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from agent_r1.evaluation.experiments.cell import TableCell
from agent_r1.evaluation.experiments.config import Part, TableFile
from agent_r1.evaluation.experiments.estimates import (
    Row,
    bootstrap_seeds,
    estimate_row,
    mean_curve,
)
from agent_r1.evaluation.experiments.findings import (
    domain_notes,
    goal_sentences,
    interval,
    listed,
    share,
)
from agent_r1.evaluation.experiments.table_report import TableResults, report
from agent_r1.evaluation.statistics import Estimate

ROOT = Path(__file__).resolve().parents[4]


def seed_scores(
    *scores: float | None,
    seed: int | None = 0,
    curve: Sequence[float] = (),
    wall_s: float = 60.0,
    **changes: Any,
) -> TableCell:
    """Return the answers of one run to the one set `near`."""
    fields = {
        "settings": {} if seed is None else {"run.seed": seed},
        "scores": {"near": scores},
        "f1": {"near": 0.5},
        "calls": {"near": 4.25},
        "wall_s": wall_s,
        "curve": curve,
        "tokens": [1000] * len(curve),
    }
    return TableCell.model_validate(fields | changes)


def row(
    title: str,
    *runs: TableCell,
    table: Part = "methods",
    baseline: bool = False,
    **settings: JsonValue,
) -> Row[TableCell]:
    """Return a row; settings are of the learner."""
    own = {f"learner.{key}": value for key, value in settings.items()}
    return Row(title.lower(), title, table, runs, baseline, own)


def sentences(*rows: Row[TableCell]) -> list[str]:
    return goal_sentences([(r, estimate_row(r, ["near"])) for r in rows], ["near"])


def test_a_table_of_one_method_says_of_each_seed_how_far_it_is_from_the_baseline():
    base = row("Base", seed_scores(0, 0, seed=None), baseline=True)
    ppo = row("PPO", seed_scores(0, 0, seed=0), seed_scores(1, 1, seed=1))
    said = (
        "Seed by seed, PPO differs from Base, average over all sets, by +0.000 [+0.000, +0.000] "
        "and +1.000 [+1.000, +1.000]."
    )
    assert said in sentences(base, ppo)
    for others in ([base, row("PPO", seed_scores(1))], [base, ppo, row("GRPO", seed_scores(1))]):
        assert not any(one.startswith("Seed by seed") for one in sentences(*others))


def test_seeds_and_sets_weigh_the_same_whatever_they_have():
    # Set 1: seeds 1/2 and 1, mean 3/4; set 2: seeds 0 and 1/4, mean 1/8. Mean of both 7/16.
    found = bootstrap_seeds([[[0, 1], [1]], [[0, 0], [1, 0, 0, 0]]])
    assert found.mean == pytest.approx(7 / 16)
    assert found.low <= found.mean <= found.high


def test_equal_answers_have_an_interval_of_no_width():
    found = bootstrap_seeds([[[1, 1], [1, 1, 1]]])
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)


def test_with_questions_that_agree_only_the_drawn_seeds_count():
    # Two seeds of mean 0 and 1: a resample is (0 + 0)/2, 1/2, 1/2 or 1, each with chance 1/4, so
    # the 2.5 % and 97.5 % quantiles are 0 and 1, and the quartiles 0 and 1 or 1/2.
    found = bootstrap_seeds([[[0, 0, 0], [1, 1]]])
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)
    middle = bootstrap_seeds([[[0, 0, 0], [1, 1]]], level=0.4)
    assert (middle.low, middle.high) == (0.5, 0.5)


def test_one_seed_is_the_bootstrap_over_its_questions():
    # 100 questions, half right: standard error sqrt(1/4 / 100) = 0.05, so 0.5 -+ 1.96 * 0.05.
    found = bootstrap_seeds([[[0, 1] * 50]])
    assert found.low == pytest.approx(0.402, abs=0.015)
    assert found.high == pytest.approx(0.598, abs=0.015)


def test_eight_equal_seeds_answer_no_more_questions_than_one():
    # 400 questions, 200 right: a resample has Binomial(400, 1/2) right ones, so 0.5 -+ 1.96 * 0.025
    # = [0.451, 0.549]. Drawn anew for each seed it would be 1.96 * 0.025 / sqrt(8) = 0.017.
    answers = [1.0] * 200 + [0.0] * 200
    for num_seeds in (1, 3, 8):
        found = bootstrap_seeds([[answers] * num_seeds])
        assert (found.low, found.high) == pytest.approx((0.451, 0.549), abs=0.003)


def test_the_same_answers_give_the_same_interval():
    values = [[[i / 100 for i in range(100)], [i / 70 for i in range(70)]]]
    assert bootstrap_seeds(values) == bootstrap_seeds(values)
    assert bootstrap_seeds(values) != bootstrap_seeds(values, seed=1)


@pytest.mark.parametrize("values", [[], [[]], [[[1.0]], [[1.0], [0.0]]], [[[1.0], []]]])
def test_what_has_no_mean_is_refused(values: list[list[list[float]]]):
    with pytest.raises(ValueError, match=r"at least one|>= 1"):
        bootstrap_seeds(values)


def test_a_curve_goes_as_far_as_every_seed_does():
    assert mean_curve([seed_scores(curve=[0.0, 0.5, 1]), seed_scores(curve=[1, 0.5])]) == [0.5, 0.5]
    assert mean_curve([]) == []


@pytest.mark.parametrize(("value", "text"), [(0.9544, ".954"), (0.0, ".000"), (1.0, "1.000")])
def test_shares_are_written_as_the_paper_does(value: float, text: str):
    assert share(value) == text


@pytest.mark.parametrize(
    ("names", "text"), [("a", "a"), ("ab", "a and b"), ("abcd", "a, b, c and d")]
)
def test_names_are_listed_as_a_sentence_does(names: str, text: str):
    assert listed(list(names)) == text


def test_rows_above_both_baselines_are_said_to_be():
    base = row("Base", seed_scores(*[0] * 20, seed=None), baseline=True)
    rag = row("RAG", seed_scores(*[0] * 20, seed=None), baseline=True)
    first = sentences(base, rag, row("PPO", seed_scores(*[1] * 20)))[0]
    assert first.startswith("Does every trained row beat Base and RAG on near")
    assert first.endswith("? Yes.")


def test_a_row_whose_interval_overlaps_a_baselines_is_named_and_so_is_one_not_run():
    base = row("Base", seed_scores(0, 1, 0, 1, seed=None), baseline=True)
    found = sentences(base, row("PPO", seed_scores(1, 1, 0, 1)), row("GRPO"))[0]
    # PPO is ahead on one question of four; a quarter or more of the resamples do not have it.
    assert "No: PPO against Base on near (.750 and .500, difference +0.250 [+0.000, " in found
    assert found.endswith("Not run: GRPO.")


def test_a_row_without_masks_is_compared_with_the_one_that_has_them():
    masked = row("Masks", seed_scores(1, 1), table="ablation", algorithm="ppo", gamma=0.9)
    other = row("Other", seed_scores(0, 0), table="ablation", algorithm="grpo")
    off = {"algorithm": "ppo", "gamma": 0.9, "advantage_mask": False}
    unmasked = row("None", seed_scores(0, 0), table="ablation", **off)
    assert sentences(other, masked, unmasked) == [
        "Masks against None, average: 1.000 against 0.000, difference +1.000 [+1.000, +1.000]; "
        "the interval does not hold 0."
    ]


def test_a_row_is_called_the_best_only_where_its_difference_from_every_other_is_above_0():
    best = row("A", seed_scores(*[1] * 20))
    clear = sentences(best, row("B", seed_scores(*[0] * 20)))
    assert clear == [
        "The highest average is that of A, 1.000 [1.000, 1.000]; the interval of its difference "
        "from every other row is above 0. From the next one, B, it differs by "
        "+1.000 [+1.000, +1.000]."
    ]
    # B is ahead on one question of 20, which 0.95^20 = 36 % of the resamples do not have.
    close = sentences(row("A", seed_scores(*[0, 1] * 10)), row("B", seed_scores(*[0, 1] * 9, 1, 1)))
    assert close == [
        "No row is clearly the best: the averages of A, B are from .500 to .550, and their "
        "differences from the highest have intervals that hold 0."
    ]
    assert sentences(best) == []  # better than nothing is no finding


def test_rows_are_compared_question_by_question():
    # Each seed of B answers what A answers, 200 of 400, and 20 more. The averages have intervals
    # of 1.96 * 0.025 = 0.049 to either side and overlap; the difference is that of 20 ones in
    # 400, 0.05 -+ 1.96 * sqrt(.05 * .95 / 400) = 0.05 -+ 0.021.
    some, more = [1.0] * 200 + [0.0] * 200, [1.0] * 220 + [0.0] * 180
    a = row("A", *(seed_scores(*some, seed=seed) for seed in range(8)))
    for seeds in (range(8), range(3)):
        b = row("B", *(seed_scores(*more, seed=seed) for seed in seeds))
        first, second = estimate_row(a, ["near"]), estimate_row(b, ["near"])
        assert first is not None
        assert second is not None
        assert second.of().low < first.of().high
        above = second.above(first)
        assert vars(above) == pytest.approx({"mean": 0.05, "low": 0.029, "high": 0.071}, abs=0.003)
        assert second.above(first, "near") == above
        assert sentences(a, b)[0].startswith("The highest average is that of B")


def test_rows_with_the_same_seeds_are_compared_seed_by_seed():
    # Questions agree, seeds 0 and 1 differ by a half, and B is 0.25 above A with each of them.
    a = row("A", seed_scores(0.0, 0.0, seed=0), seed_scores(0.5, 0.5, seed=1))
    b = row("B", seed_scores(0.25, 0.25, seed=0), seed_scores(0.75, 0.75, seed=1))
    first, second = estimate_row(a, ["near"]), estimate_row(b, ["near"])
    assert first is not None
    assert second is not None
    assert second.above(first) == Estimate(0.25, 0.25, 0.25)


def far_and_near(title: str, near: float, far: float) -> Row[TableCell]:
    """One run with a question of either set."""
    scores = {"near": [near], "far": [far]}
    return Row(title.lower(), title, "methods", [seed_scores(scores=scores)])


def test_the_average_is_over_what_was_trained_on():
    found = estimate_row(far_and_near("A", 1.0, 0.0), ["near", "far"], ["near"])
    assert found is not None
    assert found.of().mean == 1.0


@pytest.mark.parametrize(("far", "told"), [(0.0, True), (1.0, False)])
def test_a_set_that_no_row_answers_is_said_to_tell_nothing(far: float, told: bool):
    rows = [far_and_near("A", 1.0, 0.0), far_and_near("B", 1.0, far)]
    estimated = [(r, estimate_row(r, ["near", "far"], ["near"])) for r in rows]
    notes = domain_notes(estimated, ["near", "far"], ["near"])
    assert notes[0] == "The average is over near, whose kinds of question were trained on."
    assert ("No row answers more than .000 of far" in " ".join(notes)) is told
    assert domain_notes(estimated, ["near"], ["near"]) == []
    notes = domain_notes(estimated, ["near", "far"], ["near"], named=True)
    assert notes[0] == "The average is over near."


def test_the_average_is_over_the_sets_that_the_table_names(tmp_path: Path):
    both = replace(
        results(far_and_near("A", 1.0, 0.0), average=["far"]),
        sets=["near", "far"],
        in_domain=["near", "far"],
    )
    text = both.write(tmp_path / "small")[0].read_text()
    assert "| A | 1.000 [1.000, 1.000] | .000 [.000, .000] | .000 [.000, .000] |" in text
    assert "The average is over far." in text


def results(*rows: Row[TableCell], **table: Any) -> TableResults:
    """Return rows with what a table file says beside its methods."""
    said = {"config": "run.toml", "results": "small", "seeds": [0], "methods": [{"name": "ppo"}]}
    return TableResults(
        name="small",
        table=TableFile.model_validate(said | table),
        rows=rows,
        sets=["near"],
        in_domain=["near"],
        budget="Every row spends little.",
        command="agent-r1 table small.toml",
        versions={"Python": "3.11"},
        settings={"ppo": {"lr": 0.1}},
    )


def test_the_report_says_what_answers_cost_and_how_fast_they_were_learned(tmp_path: Path):
    # Ten steps of 1,000 tokens at .5, then ten at 1: the area is .75, and of the ten steps that
    # end with the 17th, 3 are at .5 and 7 at 1, which is the first mean of .85.
    learned = seed_scores(1, curve=[0.5] * 10 + [1.0] * 10)
    flat = [seed_scores(0, seed=seed, curve=[0.5] * 20) for seed in (0, 1)]
    rows = row("PPO", learned), row("Flat", *flat), row("GRPO")
    text = results(*rows, threshold=0.85).write(tmp_path / "small")[0].read_text()
    assert "| reached | sampled tokens to .850 |" in text
    assert "| PPO | 1 | .500 | 4.2 | .750 | 1 of 1 | 17,000 |" in text
    assert "| Flat | 2 | .500 | 4.2 | .500 | 0 of 2 | censored |" in text
    assert "| GRPO | 0 | - | - | - | - | - |" in text
    text = results(*rows).write(tmp_path / "small")[0].read_text()
    assert "| PPO | 1 | .500 | 4.2 | .750 |\n" in text
    assert "threshold" not in text


def test_a_report_names_its_measure_and_not_the_papers(tmp_path: Path):
    run = seed_scores(1, 0, curve=[0.5], f1={})
    counted = results(row("PPO", run), measure="trials:all_tests_passed")
    markdown, numbers, drawing = counted.write(tmp_path / "small")
    text, drawn = markdown.read_text(), drawing.read_text()
    found = json.loads(numbers.read_text())
    assert found["measure"] == "trials:all_tests_passed"
    assert report(found) == text
    assert "All tests passed on held-out questions" in text
    assert "The curve shows all tests passed in the training rollouts" in text
    assert "![All tests passed in the training rollouts per step" in text
    assert "Methods: all tests passed in the training rollouts</text>" in drawn
    assert ">all tests passed</text>" in drawn
    assert not re.search("exact match|arxiv", text + drawn, re.IGNORECASE)
    # The task has no F1.
    assert "| method | seeds | calls a question | area under the curve |" in text
    assert "| PPO | 1 | 4.2 | .500 |" in text
    assert "F1" not in text


def test_a_row_of_which_a_run_did_not_measure_f1_has_none(tmp_path: Path):
    runs = [seed_scores(1, seed=seed, curve=[0.5]) for seed in (0, 1)]
    unmeasured = seed_scores(1, seed=1, curve=[0.5], f1={})
    rows = row("PPO", *runs), row("GRPO", runs[0], unmeasured)
    text = results(*rows).write(tmp_path / "small")[0].read_text()
    assert "| PPO | 2 | .500 | 4.2 | .500 |\n" in text
    assert "| GRPO | 2 | - | 4.2 | .500 |\n" in text


def test_the_report_holds_every_row_and_what_was_not_run(tmp_path: Path):
    ppo = row("PPO", seed_scores(1, 0, seed=0, curve=[0.1, 0.2]), seed_scores(1, 1, seed=1))
    rows = ppo, row("GRPO"), row("Off", table="ablation")
    files = results(*rows).write(tmp_path / "small")
    assert [file.name for file in files] == ["small.md", "small.json"]
    numbers = json.loads(files[1].read_text())
    # One line a row, set and seed; the means are 1/2 and 1.
    assert [(r["method"], r["set"], r["seed"], r["score"], r["n"]) for r in numbers["rows"]] == [
        ("ppo", "near", 0, 0.5, 2),
        ("ppo", "near", 1, 1.0, 2),
    ]
    assert numbers["rows"][0]["table"] == "methods"
    assert numbers["rows"][0]["wall_s"] == 60.0
    assert numbers["command"] == "agent-r1 table small.toml"
    assert numbers["settings"] == {"ppo": {"lr": 0.1}}
    text = files[0].read_text()
    assert re.search(r"^\| PPO \| \.750 \[.*\] \| \.750 \[.*\] \|$", text, re.MULTILINE)
    assert "| GRPO | not run | not run |" in text
    assert "| Off | yes | yes | not run | not run |" in text
    assert "arxiv.org/abs/2511.14460" in text
    assert "All runs together took 2 minutes." in text


def test_the_report_says_which_choices_were_made_on_its_questions(tmp_path: Path):
    ppo = row("PPO", seed_scores(1))
    said = results(ppo, chosen_on="The learning rate was chosen on them.")
    text = said.write(tmp_path / "said")[0].read_text()
    assert "chosen on these questions.** The learning rate was chosen on them.\n" in text
    text = results(ppo).write(tmp_path / "silent")[0].read_text()
    assert "chosen on these questions.** The table file does not say which choices" in text


def test_the_report_is_made_of_what_the_json_file_holds(tmp_path: Path):
    ppo = row("PPO", seed_scores(1, 0, curve=[0.1, 0.2]))
    markdown, numbers, *_ = results(ppo, row("GRPO")).write(tmp_path / "small")
    assert report(json.loads(numbers.read_text())) == markdown.read_text()


def test_the_committed_results_are_what_their_numbers_give_and_say_what_was_chosen_on_them():
    markdown = ROOT / "docs" / "results" / "tiny_world.md"
    found = json.loads(markdown.with_suffix(".json").read_text())
    text = markdown.read_text()
    assert report(found) == text
    table = tomllib.loads((ROOT / "examples" / "tiny_world" / "table.toml").read_text())
    assert table["chosen_on"].strip() in text
    # Methods within some thousandths of each other: none of them is called the best.
    assert "The highest average" not in text
    assert "No row is clearly the best" in text


@pytest.mark.parametrize(
    ("num_seeds", "said"),
    [
        (1, "2^(1-n): 1 with 1 seed. So no difference over 1 seed is significant at 0.05, "),
        (3, "2^(1-n): .25 with 3 seeds. So no difference over 3 seeds is significant at 0.05, "),
        (8, "2^(1-n): .0078 with 8 seeds.\n"),
    ],
)
def test_a_table_says_how_small_a_p_value_its_seeds_allow(
    tmp_path: Path, num_seeds: int, said: str
):
    # All of one sign: 2 of 2^n patterns.
    ppo = row("PPO", *(seed_scores(1, 0, seed=seed) for seed in range(num_seeds)))
    text = results(ppo).write(tmp_path / "small")[0].read_text()
    assert said in text


def test_intervals_of_an_older_version_are_said_to_be_too_narrow(tmp_path: Path):
    ppo = row("PPO", *(seed_scores(1, 0, seed=seed) for seed in range(3)))
    found = json.loads(results(ppo).write(tmp_path / "small")[1].read_text())
    assert "too narrow" not in report(found)
    found["interval"]["method"] = "percentile bootstrap over seeds, then questions within each"
    # sqrt(3)
    assert "**These intervals are too narrow.**" in report(found)
    assert "with 3 seeds they are up to 1.7 times as wide" in report(found)


@pytest.mark.parametrize(("scores", "known"), [((1.0, None, 0.0), True), ((1.0, 0.0), False)])
def test_a_report_says_where_nobody_knows_which_question_failed(
    tmp_path: Path, scores: tuple[float | None, ...], known: bool
):
    run = seed_scores(*scores, failed={"near": 1})
    whole = seed_scores(1, 1, 0, seed=1)
    text = results(row("PPO", run, whole)).write(tmp_path / "small")[0].read_text()
    # Seeds weigh the same: (1/2 + 2/3) / 2.
    assert "| PPO | .583 [" in text
    assert "PPO seed 0: 1 of near" in text
    assert ("the cell does not say which" in text) is not known


TABLES = [
    file
    for file in sorted((ROOT / "docs" / "results").rglob("*.json"))
    if "estimates" in json.loads(file.read_text())
]


@pytest.mark.parametrize("file", TABLES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_committed_table_is_what_its_numbers_give_and_says_what_its_intervals_are(file: Path):
    found = json.loads(file.read_text())
    text = file.with_suffix(".md").read_text()
    assert report(found) == text
    assert ("questions once for all seeds and rows" in text) is not ("are too narrow" in text)


def test_a_committed_table_has_the_intervals_that_its_cells_give():
    folder = ROOT / "docs" / "results" / "tiny_code"
    found = json.loads((folder / "error_text.json").read_text())
    (grpo,) = [row for row in found["estimates"] if row["method"] == "grpo"]
    cells = [
        json.loads((folder / "cells" / f"grpo_seed{seed}.json").read_text()) for seed in (0, 1, 2)
    ]
    runs = [TableCell.model_validate(cell) for cell in cells]
    again = estimate_row(Row("grpo", "GRPO", "methods", runs), found["sets"])
    assert again is not None
    assert vars(again.of()) == pytest.approx(grpo["average"])
    assert vars(again.of("in_domain")) == pytest.approx(grpo["sets"]["in_domain"])


def test_a_table_with_curves_has_its_picture(tmp_path: Path):
    ppo = row("PPO", seed_scores(1, curve=[0.1, 0.2]))
    files = results(ppo).write(tmp_path / "small")
    assert [file.name for file in files][2:] == ["small_methods.svg"]
    assert "](small_methods.svg)" in files[0].read_text()


def test_a_run_that_serves_two_tables_took_its_time_once(tmp_path: Path):
    shared = seed_scores(1)
    both = results(row("A", shared), row("B", shared, table="ablation"))
    text = both.write(tmp_path / "small")[0].read_text()
    assert "All runs together took 1 minutes." in text


def test_an_interval_is_shown_around_its_mean():
    found = estimate_row(row("A", seed_scores(1, 1)), ["near"])
    assert found is not None
    assert interval(found.of()) == "1.000 [1.000, 1.000]"
