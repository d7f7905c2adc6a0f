"""What a change explains of a fall, on frames small enough to work out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agent_r1.runs.falls import Case, Explanation, explain
from agent_r1.runs.spans import Floats, compare_spans, find_fall, t_quantile

NEAR = 0.01
ALARMS = 10
"""Of 100 runs without a fall: 5 by the level, and more than 10 once in a hundred times."""
DOUBT = 50 / 55
"""A mere change is believed as far as trajectories of one span show it: 100 with and 100 without it
count as 100 * 100 / 200, against NEUTRAL = 5."""


def case(number: int, is_after: bool, score: float, **facts: Any) -> Case:
    """A trajectory that is alone in its group, and called the tool once."""
    call = {
        "tool": "search",
        "status": "ok",
        "arguments": {"query": f"q{number}"},
        "text": f"Found {number % 7}.",
        "version": "1",
        "latency_ms": 1.0,
    }
    calls = [call | facts["call"]] if facts.get("call") != {} else []
    calls += (
        [call | {"tool": "other", "latency_ms": facts["other_ms"]}] if "other_ms" in facts else []
    )
    record = {
        "step": 1 + is_after,
        "group_id": number,
        "task_id": f"q{number}",
        "metadata": facts.get("metadata", {"set": "easy"}),
        "prompt_length": 10,
        "status": "COMPLETED",
        "reason": "answer",
        "turns": [{"calls": calls}] * facts.get("turns", 1),
        "mask_spans": [[0, facts.get("sampled", 5)]],
        "reward": {"total": score, "components": {"right": score, **facts.get("components", {})}},
    }
    return Case(record, is_after, ("step.parquet", number), facts.get("weights", "fine"))


def cases(*kinds: tuple[bool, int, int, dict[str, Any]]) -> list[Case]:
    """Trajectories of some kinds: is it after, how many, how many are right, what is special."""
    made: list[Case] = []
    for is_after, count, right, facts in kinds:
        facts = {"call": {}, **facts} if facts.get("no_call") else {"call": {"x": 0}, **facts}
        made += [case(len(made) + i, is_after, float(i < right), **facts) for i in range(count)]
    return made


def parts_of(found: Explanation | None) -> dict[str, float]:
    """The part that each change explains."""
    assert found is not None
    return {part.name: part.mean for part in found.parts}


def explained(some: Sequence[Case], score: str = "right") -> Explanation:
    found = explain(some, score)
    assert found is not None
    # What no change explains is the rest, to the last digit.
    assert sum(part.mean for part in found.parts) + found.rest == pytest.approx(found.fall)
    return found


def test_harder_tasks_explain_what_their_share_times_their_difference_is():
    hard = {"metadata": {"set": "hard"}}
    found = explained(cases((False, 200, 160, {}), (True, 100, 80, {}), (True, 100, 20, hard)))
    # The share of hard tasks grew by 1/2, and they score 0.2 where others score 0.8: 0.3.
    assert found.fall == pytest.approx(0.3)
    assert parts_of(found) == {"set": pytest.approx(0.3 * DOUBT)}
    (part,) = found.parts
    assert (part.kind, part.value, part.shares) == ("tasks", "hard", (0.0, 0.5))
    assert 0.15 < part.low < part.mean < part.high < 0.4
    assert part.is_named
    # The examples are hard tasks that went wrong: after 300 others, 20 of which are right.
    assert part.examples == [("step.parquet", 320 + i) for i in range(3)]


def test_a_new_set_that_is_as_hard_explains_nothing_of_what_happened_to_all():
    other = {"metadata": {"set": "other"}}
    found = explained(cases((False, 200, 160, {}), (True, 100, 40, {}), (True, 100, 40, other)))
    assert found.parts == []
    assert found.rest == pytest.approx(0.4)
    assert ("set", "other", 0.0, 0.5) in found.others


def test_failing_calls_explain_what_those_without_them_have_kept():
    failed = {"call": {"status": "error"}}
    found = explained(cases((False, 200, 160, {}), (True, 120, 12, failed), (True, 80, 64, {})))
    # 0.6 of the trajectories, 0.1 in place of 0.8: 0.42.
    assert parts_of(found) == {"search: result": pytest.approx(0.42, abs=NEAR)}


@pytest.mark.parametrize(
    ("broken", "value"),
    [
        ({"status": "error"}, "failed"),
        ({"text": " "}, "empty"),
        ({"text": "later"}, "the same text"),
    ],
)
def test_a_tool_that_broke_for_all_is_blamed_before_one_that_became_slow(
    broken: dict[str, Any], value: str
):
    # No trajectory after has a good result, so that none tells failing from slow, or from time.
    found = explained(
        cases(
            (False, 200, 160, {"other_ms": 1.0}),
            (True, 200, 20, {"other_ms": 50.0, "call": broken}),
        )
    )
    assert found.parts[0].name == "search: result"
    assert found.parts[0].value == value
    assert found.parts[0].mean == pytest.approx(0.7, abs=0.02)
    assert all(part.mean < 0.02 for part in found.parts[1:])


def test_those_that_call_no_tool_do_not_excuse_one_that_broke():
    # Who guesses is right 2 times in 10, before and after: failing is no worse than guessing.
    failed, guess = {"call": {"status": "error"}}, {"no_call": True}
    found = explained(
        cases(
            (False, 180, 144, {}),
            (False, 20, 4, guess),
            (True, 180, 36, failed),
            (True, 20, 4, guess),
        )
    )
    # 0.9 of the trajectories fell from 0.8 to 0.2: 0.54, which is the whole fall.
    assert parts_of(found) == {"search: result": pytest.approx(0.54, abs=NEAR)}


def test_a_slower_tool_and_longer_answers_explain_nothing():
    changed = {"call": {"latency_ms": 9.0}, "sampled": 50}
    found = explained(cases((False, 200, 160, {}), (True, 200, 80, changed)))
    assert all(abs(part.mean) < 0.02 for part in found.parts)
    assert not any(part.is_named and part.mean > 0.02 for part in found.parts)
    assert found.rest > 0.35


HARD = {"metadata": {"set": "hard"}}
GUESS = {"no_call": True}
NEW = {"call": {"version": "2"}}


@pytest.mark.parametrize(
    ("some", "name", "value"),
    [
        # Half of the trajectories, 0.2 in place of 0.8: 0.3.
        (((100, 80, 80, {}, {}), (100, 80, 20, HARD, HARD)), "set", "hard"),
        (((100, 80, 80, {}, {}), (100, 80, 20, NEW, NEW)), "search: version", "2"),
        (((100, 80, 80, GUESS, GUESS), (100, 80, 20, {}, {})), "search", "called"),
        (((100, 80, 80, {}, {}), (100, 80, 20, GUESS, GUESS)), "search", "not called"),
        # A version that all calls have since then.
        (((100, 80, 80, GUESS, GUESS), (100, 80, 20, {}, NEW)), "search", "called; version 2 came"),
        # That others rose from 0.6 to 0.8 was not to be expected of these.
        (((100, 60, 80, {}, {}), (100, 80, 20, HARD, HARD)), "set", "hard"),
    ],
)
def test_a_category_that_fell_while_the_others_did_not_is_named(
    some: Sequence[tuple[int, int, int, dict[str, Any], dict[str, Any]]], name: str, value: str
):
    """Of each category: trajectories on a side, how many are right before and after, the facts."""
    before = [(False, count, right, facts) for count, right, _, facts, _ in some]
    after = [(True, count, right, facts) for count, _, right, _, facts in some]
    found = explained(cases(*before, *after))
    (part,) = found.parts
    assert (part.kind, part.name, part.value) == ("within", name, value)
    assert part.mean == pytest.approx(0.3)
    assert part.is_named
    assert part.shares == (0.5, 0.5)
    place = next(one for one in found.places if (one.trait.name, one.value) == (name, value))
    assert found.places[0].counts == place.counts == (100, 100)
    assert place.means == (pytest.approx(0.8), pytest.approx(0.2))
    # A standard error of sqrt(2 * 0.8 * 0.2 / 100) = 0.057, 1.96 times.
    assert (place.low, place.high) == (
        pytest.approx(-0.71, abs=0.02),
        pytest.approx(-0.49, abs=0.02),
    )


@pytest.mark.parametrize(
    "some",
    [
        ((100, 80, 40, {}), (100, 80, 40, HARD)),  # both alike
        ((100, 90, 60, {}), (100, 60, 30, HARD)),  # by the same difference
        ((100, 80, 40, {}), (100, 20, 10, HARD)),  # by the same half
        ((100, 80, 40, {}), (100, 0, 0, GUESS)),  # who guesses had nothing to lose
        ((100, 80, 40, {}), (7, 7, 7, HARD)),  # too few others to compare with
        ((500, 400, 350, {}), (100, 80, 40, HARD)),  # most of it is elsewhere
    ],
)
def test_a_fall_of_all_is_put_to_no_category(some: Sequence[tuple[int, int, int, dict[str, Any]]]):
    before = [(False, count, right, facts) for count, right, _, facts in some]
    after = [(True, count, right, facts) for count, _, right, facts in some]
    found = explained(cases(*before, *after))
    assert found.parts == []
    assert len(found.places) == (0 if some[1][0] < 8 else 2)


def test_what_a_change_explains_is_put_to_no_category():
    # Calls fail, so that those who call fell while those who guess did not.
    failed = {"call": {"status": "error"}}
    some = (
        (False, 100, 80, {}),
        (False, 100, 40, GUESS),
        (True, 60, 6, failed),
        (True, 40, 32, {}),
    )
    found = explained(cases(*some, (True, 100, 40, GUESS)))
    # 0.3 of the trajectories, 0.1 in place of 0.8: 0.21.
    assert parts_of(found) == {"search: result": pytest.approx(0.21, abs=NEAR)}
    assert found.places[0].value == "called"


def test_what_is_left_beside_a_cause_that_explains_a_part_is_compared():
    failed = {"call": {"status": "error"}}
    before = ((False, 100, 80, {}), (False, 100, 80, GUESS))
    after = ((True, 60, 0, failed), (True, 40, 24, {}), (True, 100, 60, GUESS))
    found = explained(cases(*before, *after))
    # Failing calls take 0.6 from 0.3 of the trajectories, 0.18, and a little more (TIME);
    # all fall by 0.2 beside it.
    assert parts_of(found) == {"search: result": pytest.approx(0.18, abs=2 * NEAR)}
    assert found.rest == pytest.approx(0.2, abs=2 * NEAR)


def test_bad_weights_that_cost_every_set_a_half_are_the_only_cause():
    bad = {"weights": "the canary warned"}
    before = ((False, 200, 160, {}), (False, 200, 40, HARD))
    found = explained(cases(*before, (True, 200, 80, bad), (True, 200, 20, HARD | bad)))
    assert parts_of(found) == {"weights": pytest.approx(0.25, abs=NEAR)}


def test_twenty_categories_are_listed_at_most():
    x, y = ({"metadata": {f"field {i}": value for i in range(12)}} for value in "xy")
    found = explained(cases(*((after, 20, 10, of) for after in (False, True) for of in (x, y))))
    assert len(found.places) == 20


@pytest.mark.parametrize("loss", ["half", "all"])
def test_a_collapse_of_runs_with_many_categories_names_none(loss: str):
    chance = random.Random(0)
    named = 0
    for _ in range(40):
        some: list[Case] = []
        for number in range(480):
            is_after, called = number >= 240, chance.random() < 0.8
            fields = {name: chance.choice("xyz") for name in ("set", "level", "source")}
            skill = 0.8 if called and fields["set"] != "z" else 0.3
            skill *= {"half": 0.5, "all": 0.05}[loss] if is_after else 1.0
            facts = {"metadata": fields, "call": {"x": 0} if called else {}}
            some.append(case(number, is_after, float(chance.random() < skill), **facts))
        named += any(part.kind == "within" for part in explained(some).parts)
    # 5 % by the level; 40 draws of it are above 5 once in a hundred times.
    assert named <= 5


def test_a_new_tool_that_all_use_is_not_to_blame_for_being_new():
    found = explained(cases((False, 200, 160, {}), (True, 200, 80, {"other_ms": 1.0})))
    assert parts_of(found).keys() <= {"other: calls"}
    assert found.rest == pytest.approx(0.4, abs=NEAR)


def test_weights_that_the_canary_warned_of_explain_what_is_not_seen_otherwise():
    bad = {"weights": "the canary warned"}
    found = explained(cases((False, 200, 160, {}), (True, 200, 80, bad)))
    assert parts_of(found) == {"weights": pytest.approx(0.4, abs=NEAR)}


def test_effects_of_a_cause_are_not_counted_a_second_time():
    # Failing calls are made twice, which takes two turns.
    failed = {"call": {"status": "error"}, "turns": 2, "sampled": 9}
    found = explained(cases((False, 200, 160, {}), (True, 120, 12, failed), (True, 80, 64, {})))
    assert parts_of(found) == {"search: result": pytest.approx(0.42, abs=NEAR)}


def test_a_component_that_rose_at_the_expense_of_the_score_is_found():
    pleased = {"components": {"nice": 1.0}}
    plain = {"components": {"nice": 0.0}}
    some = cases((False, 200, 160, plain), (True, 100, 80, plain), (True, 100, 10, pleased))
    # Half of the trajectories, 0.1 in place of 0.8: 0.35.
    found = explained(some)
    assert parts_of(found) == {"nice": pytest.approx(0.35 * DOUBT)}
    assert found.parts[0].kind == "component"
    # The other way round it fell along, and explains nothing.
    along = cases((False, 200, 160, pleased), (True, 200, 80, plain))
    assert explained(along).parts == []
    # One that is measured since the fall is no more than that.
    assert explained(cases((False, 200, 160, {}), (True, 200, 80, plain))).parts == []


@pytest.mark.parametrize("seed", range(20))
def test_parts_and_rest_are_the_fall_of_any_frame(seed: int):
    chance = random.Random(seed)
    some: list[Case] = []
    for number in range(240):
        is_after = chance.random() < 0.5
        call = {
            "status": chance.choice(["ok", "ok", "error"]),
            "text": chance.choice(["", "a", f"b{number}"]),
            "latency_ms": chance.expovariate(1.0),
            "version": chance.choice("12"),
        }
        facts = {
            "call": call if chance.random() < 0.8 else {},
            "metadata": {"set": chance.choice(["x", "y", "z"]), "level": chance.randrange(3)},
            "components": {"nice": chance.random()},
            "turns": chance.randrange(1, 4),
            "sampled": chance.randrange(1, 90),
        }
        some.append(case(number, is_after, chance.random(), **facts))
    assert len(explained(some).parts) > 1


def test_without_trajectories_on_both_sides_nothing_is_explained():
    assert explain(cases((False, 20, 10, {})), "right") is None
    assert explain(cases((False, 20, 10, {}), (True, 20, 10, {})), "unknown") is None


@pytest.mark.parametrize(
    # Tables of Student's distribution.
    ("share", "freedom", "expected"),
    [(0.975, 10, 2.2281), (0.999, 10, 4.1437), (0.9995, 8, 5.0413), (0.975, 1e9, 1.95996)],
)
def test_quantiles_of_t_are_those_of_the_tables(share: float, freedom: float, expected: float):
    assert t_quantile(share, freedom) == pytest.approx(expected, abs=0.01)


def test_spans_are_compared_with_an_interval_of_welch():
    steps = np.arange(1, 9, dtype=np.float64)
    # Differences 0.1, -0.2, 0.1, -0.4, 0.2, -0.1, 0: products of neighbours sum to -0.18, squares
    # to 0.27, so r = 1 - 2 * 0.18 / 0.27 < 0: nothing is widened.
    values = np.array([0.6, 0.7, 0.5, 0.6, 0.2, 0.4, 0.3, 0.3])
    change = compare_spans("em", steps, values, (1, 4), (5, 8), 1)
    assert change is not None
    assert change.mean == pytest.approx(-0.3)
    # Variance 0.02 / 3 on each side, over 4 steps: 1/600 each; t(0.975, 6) = 2.4469.
    half = 2.4469 * (2 / 600) ** 0.5
    assert (change.low, change.high) == pytest.approx((-0.3 - half, -0.3 + half), abs=1e-3)
    assert change.fell
    wider = compare_spans("em", steps, values, (1, 4), (5, 8), 1000)
    assert wider is not None
    assert wider.low < change.low < change.high < wider.high
    assert compare_spans("em", steps, values, (1, 1), (2, 2), 1) is None
    level = compare_spans("em", steps, np.full(8, 0.1), (1, 4), (5, 8), 1)
    assert level is not None
    assert not level.fell


def test_steps_that_resemble_their_neighbours_count_for_fewer():
    steps = np.arange(1, 41, dtype=np.float64)
    # Differences 1, -1, 1, ...: their correlation is -1, so r = -1, and nothing is widened.
    apart = np.tile([0.0, 0.1], 20)
    # Differences 1, 0, -1, 0, ...: their correlation is 0, so r = 1, less sqrt(0.5 / 39): 0.887.
    alike = np.tile([0.0, 0.1, 0.1, 0.0], 10)
    halves = []
    for values in (apart, alike):
        change = compare_spans("em", steps, values, (1, 20), (21, 40), 1)
        assert change is not None
        halves.append(change.high - change.mean)
    # Both halves have the same values; (1 + 0.8868) / (1 - 0.8868) = 16.66.
    assert halves[1] == pytest.approx(halves[0] * 16.66**0.5, rel=1e-3)


def correlated(chance: np.random.Generator, steps: int, correlation: float) -> Floats:
    """AR(1) with standard deviation 0.1."""
    values = 0.1 * chance.standard_normal(steps)
    for i in range(1, steps):
        values[i] = correlation * values[i - 1] + (1 - correlation**2) ** 0.5 * values[i]
    return values


@pytest.mark.parametrize(("steps", "correlation"), [(60, 0.0), (60, 0.5), (200, 0.0), (200, 0.5)])
def test_correlated_steps_are_no_fall_and_hide_none(steps: int, correlation: float):
    chance = np.random.default_rng(0)
    places = np.arange(1, steps + 1, dtype=np.float64)
    alarms = found = 0
    for _ in range(100):
        values = correlated(chance, steps, correlation)
        plain = find_fall("em", places, values)
        # A fall of 0.3, which is what is planted in the runs of benchmarks/falls.py.
        fallen = find_fall("em", places, values - 0.3 * (places > 0.7 * steps))
        assert plain is not None
        assert fallen is not None
        alarms += plain.fell
        found += fallen.fell and abs(fallen.after[0] - 0.7 * steps) <= 6
    assert alarms <= ALARMS
    # Where 60 steps tell as much as 20, some falls are lost in the noise.
    assert found >= (98 if correlation == 0.0 else 60)


def test_a_fall_is_found_where_it_is():
    rng = np.random.default_rng(0)
    steps = np.arange(1, 61, dtype=np.float64)
    values = np.where(steps < 40, 0.7, 0.4) + 0.05 * rng.standard_normal(60)
    values[10] = np.nan
    change = find_fall("em", steps, values)
    assert change is not None
    assert change.fell
    assert change.after[0] == 40


def test_what_is_found_has_the_lowest_interval_of_all_places():
    steps = np.arange(1, 31, dtype=np.float64)
    for seed in range(20):
        values = correlated(np.random.default_rng(seed), 30, 0.7)
        found = find_fall("em", steps, values)
        highs: list[float] = []
        for width in (5, 10):
            places = 31 - 2 * width
            for first in range(1, places + 1):
                spans = (first, first + width - 1), (first + width, first + 2 * width - 1)
                change = compare_spans("em", steps, values, *spans, 2 * places)
                assert change is not None
                highs.append(change.high)
        assert found is not None
        assert found.high == pytest.approx(min(highs))


def test_noise_and_learning_are_no_fall():
    rng = np.random.default_rng(1)
    steps = np.arange(1, 61, dtype=np.float64)
    falls = 0
    for _ in range(200):
        change = find_fall("em", steps, 0.005 * steps + 0.1 * rng.standard_normal(60))
        assert change is not None
        falls += change.fell
    # At most 5 % by the level; 200 draws of it are above 18 once in a hundred times.
    assert falls <= 18
