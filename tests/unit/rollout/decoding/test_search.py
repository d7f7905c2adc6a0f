"""Searches over branches, with a model and a scorer whose every word is scripted, by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import pytest
from pydantic import ValidationError

from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.parts import TextPart
from agent_r1_proto.rewards import ScoreRequest
from agent_r1_proto.tasks import Decoding, SamplingParameters, Task
from agent_r1_proto.tools import ToolCall, ToolResult
from agent_r1_proto.trajectory import Trajectory
from tests.support.branching import SCORER_TOKENS, Write, asks, searching
from tests.support.builders import rollout_task
from tests.support.fakes import (
    FORGETFUL_TEMPLATE,
    FakeToolServer,
    build_tokenizer,
    call_text,
)


def own_number(path: str) -> int:
    """Return which of its siblings a branch is; the greedy one writes what the first writes."""
    name = path.rstrip("~").rpartition(".")[2]
    return int(name) if name.isdecimal() else 0


def num_results(dialogue: str) -> int:
    return dialogue.count("</tool_response>")


def walking(depth: int) -> Write:
    """Write a model that goes one step a turn, to the place that its number names, and answers.

    After the steps 1 and 0 it stands at "10".
    """

    def write(dialogue: str, path: str, seed: int) -> str:
        if num_results(dialogue) == depth:
            return f"<answer>{place(dialogue)}</answer>"
        return call_text(query=place(dialogue) + str(own_number(path)))

    return write


def place(dialogue: str) -> str:
    """Return where a walk stands: the last result says it."""
    return re.findall(r"at (\d*)\n</tool_response>", dialogue)[-1] if num_results(dialogue) else ""


def stands(call: ToolCall) -> ToolResult:
    return ToolResult(parts=[TextPart(text=f"at {call.arguments['query']}")])


def worth(values: Mapping[str, float]) -> Any:
    """Return a scorer that knows what places are worth: where a branch stands, or wants to go."""

    def score(interaction: ScoreRequest) -> float:
        turn = interaction.turns[-1]
        said = turn.calls[-1].text if turn.calls else turn.text
        found = re.findall(r"\d+", said)
        return values.get(found[-1], 0.0) if found else 0.0

    return score


def answer(trajectory: Trajectory) -> str:
    found = re.search(r"<answer>(.*)</answer>", trajectory.turns[-1].text)
    return "" if found is None else found[1]


def queries(server: FakeToolServer) -> list[str]:
    return sorted(str(call.arguments["query"]) for call in server.calls)


async def test_every_branch_has_a_history_of_its_own_where_the_template_rewrites_it(end_id: int):
    tokenizer = build_tokenizer(template=FORGETFUL_TEMPLATE)
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id], segments=True)

    def thinking(dialogue: str, path: str, seed: int) -> str:
        return f"<think>{path}</think>" + walking(2)(dialogue, path, seed)

    values = worth({"0": 0.3, "1": 0.1, "00": 0.2, "01": 0.9})
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, thinking, values, server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=2))
    assert (trajectory.status, answer(trajectory)) == ("COMPLETED", "01")
    segments = [
        chat.decode(trajectory.token_ids[start:end].tolist())
        for start, end in trajectory.segment_bounds()
    ]
    # Each holds its own thought alone, and the results that led there, and none of a sibling's.
    assert [segment.count("<think>") for segment in segments] == [1, 1, 1]
    found = [re.findall(r"at (\d*)\n</tool_response>", segment) for segment in segments]
    assert found == [[], ["0"], ["0", "01"]]


async def test_the_best_candidate_is_kept_after_every_turn(chat: ChatFormat, end_id: int):
    values = worth({"0": 0.1, "1": 0.3, "2": 0.2, "10": 0.0, "11": 0.5, "12": 0.6})
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(2), values, server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=3))
    assert (trajectory.status, answer(trajectory)) == ("COMPLETED", "12")
    assert queries(server) == ["0", "1", "10", "11", "12", "2"]
    cost = trajectory.decoding
    assert cost is not None
    # Two turns of three candidates; all answers are the same, so none of them is scored.
    assert (cost.calls, cost.scores, cost.scorer_tokens) == (6, 6, 6 * SCORER_TOKENS)
    assert cost.places == 2
    assert cost.sampled_tokens == built.model.num_sampled > trajectory.num_action_tokens
    assert (cost.score, cost.replayed_calls) == (None, 0)


async def test_a_branch_is_sampled_after_the_very_tokens_of_its_parent(
    chat: ChatFormat, end_id: int
):
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(1), worth({"1": 1.0}), server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=2))
    prompts = [request.token_ids for request in built.model.requests]
    first, second = (trajectory.token_ids[: turn.start].tolist() for turn in trajectory.turns)
    assert prompts == [first] * 3 + [second] * 3  # the greedy turn, and two candidates
    assert [request.temperature for request in built.model.requests] == [0.0, 1.0, 1.0] * 2
    assert len({request.seed for request in built.model.requests}) == 6
    assert len({request.request_id for request in built.model.requests}) == 6


async def test_with_lookahead_0_only_the_calls_of_the_kept_are_run(chat: ChatFormat, end_id: int):
    values = worth({"0": 0.1, "1": 0.3, "2": 0.2})
    async with (
        FakeToolServer(answer=stands, sessions=True) as server,
        searching(chat, end_id, walking(1), values, server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=3, lookahead=0))
    assert answer(trajectory) == "1"
    assert queries(server) == ["1"]
    # One branch is left at any time, so it needs no session but the first.
    assert server.opened == server.closed == ["run/1/0/0/0"]


@pytest.mark.parametrize("lookahead", [0, 1])
async def test_the_scorer_gets_the_very_tokens_that_lead_to_the_state(
    chat: ChatFormat, end_id: int, lookahead: int
):
    values = worth({"0": 0.1, "1": 0.3})
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(1), values, server) as built,
    ):
        decoding = asks("value_guided", candidates=2, lookahead=lookahead)
        trajectory = await built.loop.run(decoding)
    first, last = trajectory.turns
    # As written, the state is that before the last token of the turn; else that after the reply.
    ends = {0: first.end - 1, 1: last.start}
    asked = [request.token_ids for request in built.scorer.asked]
    assert asked[1] == trajectory.token_ids[: ends[lookahead]].tolist()
    assert asked[0] != asked[1]


@pytest.mark.parametrize(("lookahead", "reached"), [(1, "01"), (2, "11")])
async def test_looking_ahead_finds_what_a_step_hides(
    chat: ChatFormat, end_id: int, lookahead: int, reached: str
):
    # Place 0 looks better than 1. A probe goes on with the number of its candidate, so that it sees
    # 00 (0.1) from 0, and 11 (0.9) from 1.
    values = worth({"0": 0.5, "1": 0.2, "00": 0.1, "01": 0.3, "10": 0.0, "11": 0.9})
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(2), values, server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=2, lookahead=lookahead))
    assert answer(trajectory) == reached


@pytest.mark.parametrize(
    ("method", "options", "reached"),
    [("value_guided", {}, "00"), ("beam", {"keep": 2}, "11")],
)
async def test_a_beam_keeps_what_comes_second_at_first(
    chat: ChatFormat, end_id: int, method: str, options: dict[str, Any], reached: str
):
    values = worth({"0": 0.6, "1": 0.5, "2": 0.1, "00": 0.3, "01": 0.2, "10": 0.1, "11": 0.9})
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(2), values, server) as built,
    ):
        trajectory = await built.loop.run(asks(method, candidates=3, **options))
    assert answer(trajectory) == reached


async def test_best_of_n_takes_the_whole_interaction_that_is_scored_highest(
    chat: ChatFormat, end_id: int
):
    # Its branches keep their number to the end: 00, 11 and 22.
    values = worth({"00": 0.2, "11": 0.7, "22": 0.6})
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(2), values, server) as built,
    ):
        trajectory = await built.loop.run(asks("best_of_n", candidates=3))
    assert answer(trajectory) == "11"
    assert trajectory.decoding is not None
    assert (trajectory.decoding.calls, trajectory.decoding.scores) == (6, 3)
    assert [asked.status for asked in built.scorer.asked] == ["COMPLETED"] * 3


async def test_majority_takes_the_most_frequent_answer(chat: ChatFormat, end_id: int):
    answers = ["Rome", "Paris", " rome", "", "paris", "Rome"]

    def write(dialogue: str, path: str, seed: int) -> str:
        said = answers[own_number(path)]
        return f"<answer>{said}</answer>" if said else "I cannot say."

    async with searching(chat, end_id, write) as built:
        most = await built.loop.run(asks("majority", candidates=6))
        tied = await built.loop.run(asks("majority", candidates=5))  # two and two: the first
    assert most.turns[0].text == tied.turns[0].text == "<answer>Rome</answer>"
    assert most.decoding is not None
    assert (most.decoding.score, most.decoding.scores) == (None, 0)


async def test_majority_and_best_of_n_choose_from_the_same_samples(chat: ChatFormat, end_id: int):
    def write(dialogue: str, path: str, seed: int) -> str:
        return f"<answer>{seed}</answer>"

    async with searching(chat, end_id, write, lambda _: 0.0) as built:
        await built.loop.run(asks("best_of_n", candidates=3))
        await built.loop.run(asks("majority", candidates=3))
    seeds = [request.seed for request in built.model.requests]
    assert seeds[:3] == seeds[3:]


async def test_equal_candidates_are_one_and_a_single_one_is_not_scored(
    chat: ChatFormat, end_id: int
):
    def write(dialogue: str, path: str, seed: int) -> str:
        if num_results(dialogue):
            return f"<answer>{own_number(path) // 2}</answer>"  # 0, 0, 1, 1
        return call_text(query="7")

    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, write, worth({"1": 0.5}), server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=4))
    assert queries(server) == ["7"]
    assert [asked.turns[-1].answer for asked in built.scorer.asked] == ["0", "1"]
    assert answer(trajectory) == "1"
    assert trajectory.decoding is not None
    assert (trajectory.decoding.scores, trajectory.decoding.score) == (2, 0.5)
    # What was sampled four times, and greedily, has been paid five times.
    assert trajectory.decoding.sampled_tokens == 5 * trajectory.num_action_tokens


# --- the rule -------------------------------------------------------------------------------------


def differing(*texts: str) -> Write:
    """Write a model whose greedy turn is the first of some answers, and candidates all of them."""
    return lambda dialogue, path, seed: f"<answer>{texts[own_number(path)]}</answer>"


@pytest.mark.parametrize(
    ("beta", "reached"),
    [
        # A token has the log-probability -0.5, and the two answers differ by five tokens: 2.5 nats.
        # A value that is 0.5 higher is worth more than that from beta = 5 on.
        (4.9, "3"),
        (5.1, "400000"),
    ],
)
async def test_a_value_outweighs_what_is_likely_only_with_enough_weight(
    chat: ChatFormat, end_id: int, beta: float, reached: str
):
    values = worth({"3": 0.1, "400000": 0.6})
    async with searching(chat, end_id, differing("3", "400000"), values) as built:
        trajectory = await built.loop.run(asks("value_guided", candidates=2, beta=beta))
    short, long = (len(chat.encode(text)) for text in ("3", "400000"))
    assert long - short == 5
    assert answer(trajectory) == reached


async def test_without_weight_nothing_is_scored_and_the_likeliest_is_taken(
    chat: ChatFormat, end_id: int
):
    async with searching(chat, end_id, differing("400000", "3")) as built:
        asked = asks("value_guided", candidates=2, beta=0.0, scorer=None)
        trajectory = await built.loop.run(asked)
    assert answer(trajectory) == "3"
    assert trajectory.decoding is not None
    assert (trajectory.decoding.scores, trajectory.decoding.places) == (0, 1)


@pytest.mark.parametrize(
    ("method", "places"),
    [("value_guided", 2), ("beam", 1 + 2), ("majority", None), ("best_of_n", None)],
)
async def test_states_with_several_candidates_are_counted(
    chat: ChatFormat, end_id: int, method: str, places: int | None
):
    # Steps 0 and 1 may follow, twice. A beam goes on from both, with two copies each.
    options: dict[str, Any] = {"keep": 4} if method == "beam" else {}
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(2), worth({}), server) as built,
    ):
        trajectory = await built.loop.run(asks(method, candidates=2, **options))
    assert trajectory.decoding is not None
    assert trajectory.decoding.places == places


async def test_whether_to_answer_the_model_alone_decides(chat: ChatFormat, end_id: int):
    # The scorer likes the answer best by far; to call is likelier, since it is the shorter turn.
    def write(dialogue: str, path: str, seed: int) -> str:
        if num_results(dialogue):
            return f"<answer>{place(dialogue)}</answer>"
        long_answer = "<answer>9" + "0" * 40 + "</answer>"
        return [call_text(query="1"), long_answer, call_text(query="2")][own_number(path)]

    values = worth({"1": 0.1, "2": 0.3, "9" + "0" * 40: 1.0})
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, write, values, server) as built,
    ):
        options: dict[str, Any] = {"candidates": 3, "lookahead": 0, "beta": 50.0}
        trajectory = await built.loop.run(asks("value_guided", **options))
        biased = await built.loop.run(asks("value_guided", answer_bias=30.0, **options))
    # Of the two calls, which are as likely as each other, the better one is made.
    assert answer(trajectory) == "2"
    # The answer is less likely by 0.5 for each of its 50 or so tokens more.
    assert answer(biased) == "9" + "0" * 40


async def test_the_greedy_turn_is_a_candidate_where_no_sample_repeats_it(
    chat: ChatFormat, end_id: int
):
    def write(dialogue: str, path: str, seed: int) -> str:
        said = "7" if path.endswith("g") else str(own_number(path))
        return f"<answer>{said}</answer>"

    async with searching(chat, end_id, write, worth({"0": 0.1, "7": 0.9})) as built:
        trajectory = await built.loop.run(asks("value_guided", candidates=2))
    assert answer(trajectory) == "7"
    assert sorted(asked.turns[-1].answer or "" for asked in built.scorer.asked) == ["0", "1", "7"]


async def test_branches_of_a_beam_are_judged_once_more_for_the_vote(chat: ChatFormat, end_id: int):
    # Two steps that are as likely, each with two of four copies. The answers after them have no
    # rivals, so nothing but the vote asks what they are worth.
    def score(interaction: ScoreRequest) -> float:
        return float(interaction.turns[-1].answer == "1")

    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(1), score, server) as built,
    ):
        trajectory = await built.loop.run(asks("beam", candidates=2, keep=4, lookahead=0))
    assert answer(trajectory) == "1"
    assert trajectory.decoding is not None
    assert (trajectory.decoding.score, trajectory.decoding.scores) == (1.0, 2 + 2)


async def test_a_turn_that_is_all_but_sure_is_not_searched(chat: ChatFormat, end_id: int):
    def write(dialogue: str, path: str, seed: int) -> str:
        return "<answer>1</answer>" if path.endswith("g") else f"<answer>2{path[-1]}</answer>"

    # Of the greedy turn, which is shorter and so likelier than the others.
    tokens = len(chat.encode("<answer>1</answer>")) + 1
    probability = math.exp(-0.5 * tokens)
    for limit, requests in ((1.01 * probability, 1 + 2), (0.99 * probability, 1)):
        async with searching(chat, end_id, write, worth({})) as built:
            asked = asks("value_guided", candidates=2, branch_below=limit, beta=9.0)
            trajectory = await built.loop.run(asked)
        assert len(built.model.requests) == requests
        assert trajectory.decoding is not None
        assert trajectory.decoding.places == (requests > 1)


async def test_the_greedy_answer_is_among_whole_ones(chat: ChatFormat, end_id: int):
    async with searching(chat, end_id, differing("1", "2", "3"), worth({"1": 0.5})) as built:
        trajectory = await built.loop.run(asks("best_of_n", candidates=3))
    assert answer(trajectory) == "1"
    assert [request.temperature for request in built.model.requests] == [0.0, 1.0, 1.0]


# --- what turns are worth -------------------------------------------------------------------------


async def test_continuations_say_what_the_candidates_of_a_turn_are_worth(
    chat: ChatFormat, end_id: int
):
    # A walk of one step, to 0 or 1, whose answer is where it stands; the third candidate answers.
    def write(dialogue: str, path: str, seed: int) -> str:
        if num_results(dialogue):
            return f"<answer>{place(dialogue)}</answer>"
        return [call_text(query="0"), call_text(query="1"), "<answer>5</answer>"][own_number(path)]

    task = with_budget(answers=["1"])
    async with (
        FakeToolServer(answer=stands, sessions=True) as server,
        searching(chat, end_id, write, worth({"1": 1.0, "5": 0.25}), server) as built,
    ):
        asked = asks(
            "value_guided", candidates=3, beta=0.0, scorer=None, lookahead=0, continuations=2,
            purpose="value", task=task,
        )  # fmt: skip
        trajectory = await built.loop.run(asked)
    assert trajectory.status == "COMPLETED"
    assert trajectory.decoding is not None
    probe = trajectory.decoding.probe
    assert probe is not None
    assert probe.after == 0
    found = {one.turn.text: one.outcomes for one in probe.candidates}
    # An answer ends the interaction, so it is not continued.
    assert found == {
        call_text(query="0"): [0.0, 0.0],
        call_text(query="1"): [1.0, 1.0],
        "<answer>5</answer>": [0.25],
    }
    assert [one.turn.calls for one in probe.candidates] == [[], [], []]
    assert probe.candidates[0].logprob == pytest.approx(-0.5 * len(sampled_ids(chat, "0")))
    # Only outcomes are asked for, and whoever judges them knows the payload.
    assert built.scorer.asked == []
    assert all(one.payload == {"answers": ["1"]} for one in built.scorer.judged)
    assert sorted(server.closed) == sorted(server.opened)


def sampled_ids(chat: ChatFormat, query: str) -> list[int]:
    return [*chat.encode(call_text(query=query)), 0]  # and the end of the turn


async def test_a_place_is_shown_with_the_turns_that_lead_to_it(chat: ChatFormat, end_id: int):
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(3), worth({}), server) as built,
    ):
        places: set[int] = set()
        first_steps: set[object] = set()
        for seed in range(12):
            asked = asks(
                "value_guided", candidates=2, beta=0.0, scorer=None, continuations=1,
                purpose="value", sampling=SamplingParameters(seed=seed),
            )  # fmt: skip
            trajectory = await built.loop.run(asked)
            assert trajectory.decoding is not None
            probe = trajectory.decoding.probe
            assert probe is not None
            places.add(probe.after)
            walked = [turn.calls[0].arguments["query"] for turn in trajectory.turns[:3]]
            first_steps.add(walked[0])
            before = walked[probe.after - 1] if probe.after else ""
            wanted = {call_text(query=f"{before}{number}") for number in (0, 1)}
            assert {one.turn.text for one in probe.candidates} == wanted
    assert places == {0, 1, 2}
    # Its turns are drawn, so that other states come up than those that it would choose.
    assert first_steps == {"0", "1"}


async def test_no_place_is_shown_where_turns_have_no_alternative(chat: ChatFormat, end_id: int):
    async with searching(chat, end_id, differing("1", "1")) as built:
        asked = asks(
            "value_guided", candidates=2, beta=0.0, scorer=None, continuations=2, purpose="value"
        )
        trajectory = await built.loop.run(asked)
    assert trajectory.decoding is not None
    assert trajectory.decoding.probe is None


# --- a budget of calls ----------------------------------------------------------------------------


def with_budget(**payload: Any) -> Task:
    return Task(id="q", prompt="who?", payload=payload)


async def test_a_budget_of_calls_binds_all_branches_together(chat: ChatFormat, end_id: int):
    # Two of three candidates can be run, and then none is left for the turn after.
    values = worth({"0": 0.1, "1": 0.3, "2": 0.9})
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(2), values, server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=3, max_calls=2))
    assert queries(server) == ["0", "1"]
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "decoding_max_calls")
    assert [call.arguments for turn in trajectory.turns for call in turn.calls] == [{"query": "1"}]


async def test_the_next_best_that_can_be_paid_goes_on(chat: ChatFormat, end_id: int):
    def write(dialogue: str, path: str, seed: int) -> str:
        if own_number(path) == 0:
            return call_text(query="1") + call_text(query="2")
        return "<answer>3</answer>"

    # The two calls look best, and one is allowed.
    task = with_budget(budget=1)
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, write, worth({"2": 0.9, "3": 0.1}), server) as built,
    ):
        decoding = asks("value_guided", candidates=2, lookahead=0, max_calls="budget", task=task)
        trajectory = await built.loop.run(decoding)
    assert server.calls == []
    assert (trajectory.status, answer(trajectory)) == ("COMPLETED", "3")


async def test_whole_interactions_share_the_budget_too(chat: ChatFormat, end_id: int):
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(2), worth({"00": 0.1}), server) as built,
    ):
        trajectory = await built.loop.run(asks("best_of_n", candidates=2, max_calls=3))
    assert queries(server) == ["0", "00", "1"]
    assert answer(trajectory) == "00"


@pytest.mark.parametrize("budget", [None, True, -1, "3"])
async def test_a_budget_that_the_payload_lacks_is_refused(
    chat: ChatFormat, end_id: int, budget: Any
):
    task = with_budget() if budget is None else with_budget(budget=budget)
    async with searching(chat, end_id, walking(0)) as built:
        trajectory = await built.loop.run(asks("majority", max_calls="budget", task=task))
    assert trajectory.status == "FAILED"
    assert "give every task a whole number there" in trajectory.reason
    assert built.model.requests == []


# --- the state of tools and environments ----------------------------------------------------------


def session_queries(server: FakeToolServer) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for call in server.calls:
        found.setdefault(call.rollout_id, []).append(str(call.arguments["query"]))
    return found


async def test_a_tool_that_does_not_fork_sees_the_calls_of_the_branch_again(
    chat: ChatFormat, end_id: int
):
    values = worth({"0": 0.1, "1": 0.3, "10": 0.5, "11": 0.4})
    async with (
        FakeToolServer(answer=stands, sessions=True) as server,
        searching(chat, end_id, walking(2), values, server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=2))
    assert answer(trajectory) == "10"
    # The last of two siblings inherits the session; the first has its own, with all that it has
    # done. 0 has nothing to repeat, and the session of 1 goes on with 11.
    assert session_queries(server) == {
        "run/1/0/0/0.0": ["0"],
        "run/1/0/0/0": ["1", "11"],
        "run/1/0/0/0.1.0": ["1", "10"],
    }
    assert trajectory.decoding is not None
    assert (trajectory.decoding.calls, trajectory.decoding.replayed_calls) == (4, 1)
    assert sorted(server.closed) == sorted(server.opened)
    assert server.forked == []


async def test_a_tool_that_forks_gets_no_call_twice(chat: ChatFormat, end_id: int):
    values = worth({"0": 0.1, "1": 0.3, "10": 0.5, "11": 0.4})
    async with (
        FakeToolServer(answer=stands, sessions=True, forks=True) as server,
        searching(chat, end_id, walking(2), values, server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=2))
    assert answer(trajectory) == "10"
    assert queries(server) == ["0", "1", "10", "11"]
    assert server.forked == [("run/1/0/0/0", "run/1/0/0/0.1.0")]
    begun = [*server.opened, *(copy for _, copy in server.forked)]
    assert sorted(server.closed) == sorted(begun)


class Counting(ToolEnv):
    """Shows how many turns the interaction has had."""

    closed = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.turns: list[str] = []

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        self.turns.append(turn.text)
        shown = [f"turn {len(self.turns)}, at {result.arguments['query']}" for result in results]
        return EnvStep(observations=shown, done=not results, reason="answer")

    async def close(self) -> None:
        Counting.closed += 1


async def test_every_branch_has_an_environment_of_its_own(
    chat: ChatFormat, end_id: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Counting, "closed", 0)
    values = worth({"0": 0.3, "1": 0.1, "00": 0.5, "01": 0.4})
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(2), values, server, make_env=Counting) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=2))
    shown = re.findall(r"turn \d, at \d+", chat.decode(trajectory.token_ids.tolist()))
    assert shown == ["turn 1, at 0", "turn 2, at 00"]
    # One to begin with, and a copy for the first of two siblings in each of two turns.
    assert Counting.closed == 3


class Uncopyable(Counting):
    def fork(self) -> Self:
        raise TypeError("a socket cannot be copied")


async def test_an_environment_that_cannot_be_copied_is_named(chat: ChatFormat, end_id: int):
    async with (
        FakeToolServer(answer=stands, sessions=True) as server,
        searching(chat, end_id, walking(2), worth({}), server, make_env=Uncopyable) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=2))
    assert trajectory.status == "FAILED"
    assert trajectory.reason == (
        "env_error: Uncopyable.fork raised TypeError: a socket cannot be copied; write "
        "Uncopyable.fork so that it returns a copy"
    )


# --- what is refused, and what fails --------------------------------------------------------------


async def test_a_tool_with_outside_effects_is_refused_before_anything_happens(
    chat: ChatFormat, end_id: int
):
    async with (
        FakeToolServer(answer=stands, outside_effects=True) as server,
        searching(chat, end_id, walking(1), worth({}), server) as built,
    ):
        refused = await built.loop.run(asks("value_guided"))
        plain = await built.loop.run(rollout_task())
    assert refused.status == "FAILED"
    assert refused.reason.startswith("decoding_refused: calls of search have effects outside")
    assert plain.status != "FAILED"
    assert [request.request_id for request in built.model.requests][:1] == ["run/1/0/0/0/0"]


async def test_an_outage_in_any_branch_fails_the_attempt_and_closes_all_sessions(
    chat: ChatFormat, end_id: int
):
    # Opened twice, then the first call is answered 501, which is not sent again.
    async with (
        FakeToolServer(answer=stands, sessions=True, statuses=[200, 200, 501]) as server,
        searching(chat, end_id, walking(2), worth({}), server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=2))
    assert (trajectory.status, trajectory.decoding) == ("FAILED", None)
    assert trajectory.reason.startswith("tool_broken: search")
    assert sorted(server.closed) == sorted(server.opened)
    assert len(server.opened) == 2


async def test_a_scorer_sees_turns_and_results_and_never_the_payload(chat: ChatFormat, end_id: int):
    task = with_budget(answers=["secret"])
    async with (
        FakeToolServer(answer=stands) as server,
        searching(chat, end_id, walking(1), worth({}), server) as built,
    ):
        await built.loop.run(asks("value_guided", candidates=2, task=task))
    asked = built.scorer.asked
    assert all(one.payload == {} for one in asked)
    assert [one.status for one in asked] == ["TRUNCATED", "TRUNCATED"]
    assert asked[0].prompt[0].content == "who?"
    assert asked[0].turns[0].calls[0].text == "at 0"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"method": "value_guided", "scorer": "s", "keep": 2}, "2 or more with the method beam"),
        ({"method": "beam", "scorer": "s"}, "2 or more with the method beam"),
        ({"method": "best_of_n", "scorer": "s", "lookahead": 1}, "scores whole interactions"),
        ({"method": "majority", "scorer": "s"}, "majority and beta 0 have no scorer"),
        ({"method": "value_guided"}, "everything else needs one"),
        ({"method": "value_guided", "beta": 0.0, "scorer": "s"}, "beta 0 have no scorer"),
        ({"method": "majority", "beta": 1.0}, "belongs to value_guided and beam"),
        ({"method": "beam", "keep": 2, "scorer": "s", "continuations": 2}, "needs the method"),
        ({"method": "majority", "candidates": 1}, "must be 2 or more"),
    ],
)
def test_options_that_do_not_fit_the_method_are_refused(values: dict[str, Any], match: str):
    with pytest.raises(ValidationError, match=match):
        Decoding.model_validate(values)


def test_a_search_is_for_evaluation_and_samples_above_temperature_0():
    decoding = Decoding(method="majority")
    with pytest.raises(ValidationError, match="no sample of the policy"):
        rollout_task(decoding=decoding)
    greedy = SamplingParameters(temperature=0.0)
    with pytest.raises(ValidationError, match="at temperature 0"):
        rollout_task(decoding=decoding, purpose="eval", sampling=greedy)
    probing = Decoding(method="value_guided", beta=0.0, continuations=2)
    for purpose, asked in (("eval", probing), ("value", decoding)):
        with pytest.raises(ValidationError, match="the purpose value needs 1 or more"):
            rollout_task(decoding=asked, purpose=purpose)
