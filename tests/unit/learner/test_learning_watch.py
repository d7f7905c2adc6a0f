"""What hinders learning: equal rewards, tools that only fail, an instance that is far slower."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from agent_r1.learner.groups import Group, Slot
from agent_r1.learner.learning_watch import LearningWatch
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import rollout_task, scored, trajectory


def watch(*, compares_groups: bool = True) -> LearningWatch:
    """Two groups a batch: three batches would be 6 groups, so 8 are looked at."""
    return LearningWatch(groups_per_batch=2, compares_groups=compares_groups)


def group(*rewards: float, greedy: float | None = None) -> Group:
    results = [scored(total=reward) for reward in rewards]
    if greedy is not None:
        results.append(scored(total=greedy))
    slots = [Slot(0.0, final=True, result=result) for result in results]
    return Group(0, rollout_task().task, 0, slots, has_greedy=greedy is not None)


def kinds(looking: LearningWatch, groups: Iterable[Group]) -> set[str]:
    for one in groups:
        looking.saw_group(one)
    return set(looking.look())


EQUAL = {"learning:equal_rewards"}


def test_groups_of_equal_rewards_are_said_once_three_batches_are_full():
    looking = watch()
    assert kinds(looking, [group(0.0, 0.0)] * 7) == set()
    assert kinds(looking, [group(1.0, 1.0)]) == EQUAL  # equal within is enough
    # 7 of 8 are 0.875: not enough to begin, and too many for it to be over.
    assert kinds(looking, [group(0.0, 1.0)]) == EQUAL
    # 6 of 8 are 0.75, below 0.8.
    assert kinds(looking, [group(0.0, 1.0)]) == set()
    assert kinds(looking, [group(0.0, 0.0)] * 6) == set()


def test_an_advantage_that_compares_all_groups_learns_from_unequal_ones():
    looking = watch(compares_groups=False)
    assert kinds(looking, [group(0.0, 0.0)] * 7 + [group(1.0, 1.0)]) == set()
    assert kinds(looking, [group(1.0, 1.0)] * 8) == EQUAL


def test_a_group_of_one_says_nothing_and_a_greedy_answer_counts():
    assert kinds(watch(), [group(0.0)] * 8) == set()
    assert kinds(watch(), [group(0.0, greedy=1.0)] * 8) == set()
    assert kinds(watch(), [group(0.0, greedy=0.0)] * 8) == EQUAL


def call(status: str, *, instance: str = "", ms: float = 0.0, error: str = "") -> ToolCallRecord:
    return ToolCallRecord.model_validate(
        {
            **{"end_token_index": 2, "tool": "search", "status": status, "error": error},
            **{"instance": instance, "latency_ms": ms},
        }
    )


def after(looking: LearningWatch, calls: Iterable[ToolCallRecord]) -> dict[str, tuple[str, str]]:
    for one in calls:
        looking.saw_calls(trajectory(calls=[one]))
    return looking.look()


@pytest.mark.parametrize("status", ["error", "malformed", "over_limit"])
def test_a_tool_of_which_no_call_succeeds_is_said_whatever_the_errors(status: str):
    looking = watch()
    errors = [call(status, error=f"reason {'abcdefg'[i]}") for i in range(7)]
    assert after(looking, errors) == {}
    found = after(looking, [call(status, error="reason a")])
    assert list(found) == ["learning:failing_calls:search"]
    what, _ = found["learning:failing_calls:search"]
    assert what.startswith("each of the last 8 calls of tool 'search' failed (most often: ")
    assert "reason a" in what
    assert after(looking, [call("ok")]) == {}  # 1 of 9 is more than a tenth


def test_a_tool_that_sometimes_succeeds_is_not():
    assert after(watch(), [call("ok")] + [call("error")] * 7) == {}


def test_names_of_tools_that_the_model_makes_up_are_counted_together():
    calls = [call("unknown_tool").model_copy(update={"tool": f"t{i}"}) for i in range(8)]
    assert list(after(watch(), calls)) == ["learning:failing_calls:"]


def test_calls_of_no_tool_are_said_while_nearly_all_calls_are_such():
    looking, made_up = watch(), call("unknown_tool")
    # A few among many that are answered, as any policy makes them, never add up.
    for _ in range(8):
        assert after(looking, [*[call("ok")] * 9, made_up]) == {}
    (kind,) = found = after(looking, [made_up] * 64)
    assert found[kind][0].startswith("each of the last 64 calls named no tool, or cannot be read")
    # Over once more than a tenth of them are calls of a tool.
    assert list(after(looking, [call("ok")] * 6)) == [kind]
    assert after(looking, [call("ok")]) == {}


def test_an_instance_that_is_thirty_times_slower_than_its_peers_is_said_until_it_is_not():
    looking = watch()
    fast = [call("ok", instance="one", ms=50.0)] * 8
    slow = [call("ok", instance="two", ms=1500.0)] * 4
    assert after(looking, [*fast, *slow]) == {}
    found = after(looking, [call("ok", instance="two", ms=1500.0)])
    assert list(found) == ["slow:search:two"]
    what, remedy = found["slow:search:two"]
    assert what == "instance two of tool 'search' takes 1.50 s a call, its peers 0.05 s"
    assert "agent-r1 tools drain search --instance two" in remedy
    # The last 8 of its calls are looked at: 5 fast ones are most of them.
    assert after(looking, [call("ok", instance="two", ms=50.0)] * 5) == {}
    # 1024 calls are kept: so many of the others leave none of it.
    assert list(after(looking, [call("ok", instance="two", ms=1500.0)] * 8)) == ["slow:search:two"]
    assert after(looking, [call("ok", instance="one", ms=50.0)] * 1024) == {}


def test_an_instance_that_gets_few_calls_because_it_is_slow_is_said():
    # Whoever waits for it counts as its load, so it gets 1 call of 31.
    calls = [*[call("ok", instance="one", ms=20.0)] * 30, call("ok", instance="two", ms=600.0)]
    assert list(after(watch(), calls * 5)) == ["slow:search:two"]


def test_an_instance_that_never_answers_is_said_by_the_time_that_its_calls_took():
    looking = watch()
    assert after(looking, [call("ok", instance="one", ms=50.0)] * 8) == {}
    hung = trajectory(calls=[call("failed", instance="two", ms=30_000.0)])
    for _ in range(5):
        assert looking.look() == {}
        looking.saw_times(hung)
    (what, _) = looking.look()["slow:search:two"]
    assert what == "instance two of tool 'search' takes 30.00 s a call, its peers 0.05 s"


def test_an_instance_is_not_slow_for_what_another_has_taken_or_for_its_first_calls():
    again = call("ok", instance="two", ms=30_000.0).model_copy(update={"attempt": 1})
    calls = [call("ok", instance="one", ms=50.0), again]
    assert after(watch(), calls * 8) == {}
    # Of the first five calls two are slow: the median is 50 ms.
    first = [call("ok", instance="two", ms=ms) for ms in (3000.0, 3000.0, 50.0, 50.0, 50.0)]
    found = [after(looking := watch(), [call("ok", instance="one", ms=50.0)] * 8)]
    found += [after(looking, [one]) for one in first]
    assert found == [{}] * 6


def test_an_instance_that_is_slower_by_nothing_that_matters_is_not_said():
    # 30 times slower, and 87 ms.
    calls = [call("ok", instance="one", ms=3.0), call("ok", instance="two", ms=90.0)] * 5
    assert after(watch(), calls) == {}
