"""What a run lost, and whether that is more than it may."""

from __future__ import annotations

from agent_r1.learner.outcome import Losses


def evaluation(n: int, failed: int) -> dict[str, object]:
    return {"sets": {"near": {"n": n, "failed": failed}}}


def test_the_share_is_taken_of_the_samples_that_have_a_final_result():
    losses = Losses.of({"filled": 15, "failed": 5, "reissued": 7, "duplicate": 3}, {})
    assert (losses.failed, losses.samples, losses.share) == (5, 20, 0.25)


def test_a_run_that_asked_for_nothing_lost_nothing():
    assert Losses.of({}, {}).share == 0.0
    assert Losses.of({}, {"after": evaluation(0, 0)}).problems(0.0) == []


def test_losses_within_the_limit_are_no_problem():
    losses = Losses.of({"filled": 19, "failed": 1}, {"after": evaluation(19, 1)})
    assert losses.problems(0.05) == []


def test_every_place_where_too_much_was_lost_is_named():
    evaluations = {"before": evaluation(20, 0), "after": evaluation(11, 9)}
    assert Losses.of({"filled": 9, "failed": 1}, evaluations).problems(0.05) == [
        "1 of the 10 training samples failed for good (10%)",
        "9 of the 20 questions of the evaluation after/near failed for good (45%)",
    ]
