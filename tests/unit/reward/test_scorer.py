"""Scorer: components by name, weights, the paper's rule, users' components, the HTTP side."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from agent_r1.reward.app import create_app
from agent_r1.reward.components import BUILT_IN
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import ComponentError, Scorer, request_of
from agent_r1.text.reading import TurnReader
from agent_r1_proto.rewards import Reward, ScoreRequest, ScoreTurn
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import rollout_task, three_lineages, trajectory

CALL = "<think>look</think><tool_call>{}</tool_call>"


def request(
    *turns: str, payload: dict[str, Any] | None = None, status: Any = "COMPLETED"
) -> ScoreRequest:
    return ScoreRequest(
        payload={"answers": ["Ada Lovelace"]} if payload is None else payload,
        turns=[ScoreTurn(text=turn, num_calls=turn.count("<tool_call>")) for turn in turns],
        status=status,
    )


def answered(answer: str) -> str:
    return f"<think>so</think><answer>{answer}</answer><|im_end|>"


async def test_every_built_in_component_is_reported_by_name_where_it_is_named():
    table = RewardConfig(components=dict.fromkeys(BUILT_IN, 0.0) | {"exact_match": 1.0})
    reward = await Scorer(table).score(request(CALL, answered("Ada")))
    # F1 by hand: 1 shared word, precision 1/1, recall 1/2: 2/3
    assert reward.components == pytest.approx(
        {
            "exact_match": 0.0,
            "f1": 2 / 3,
            "substring_match": 0.0,
            "format": 1.0,
            "reasoning_format": 1.0,
            "answered": 1.0,
            "tool_calls": 1.0,
            "tool_efficiency": 1.0,
        }
    )
    assert reward.total == 0.0
    assert reward.prediction == "Ada"
    assert set(reward.components) == set(BUILT_IN)


@pytest.mark.parametrize(
    ("table", "measured"),
    [
        (RewardConfig(), {"exact_match"}),
        (RewardConfig(components={"tool_calls": 1.0, "f1": 0.0}), {"tool_calls", "f1"}),
        (RewardConfig(rule="paper"), {"exact_match", "format"}),
        (RewardConfig(rule="paper", components={"f1": 0.0}), {"exact_match", "format", "f1"}),
    ],
)
async def test_nothing_is_measured_but_what_is_named_and_what_the_rule_needs(
    table: RewardConfig, measured: set[str]
):
    reward = await Scorer(table).score(request(CALL, answered("Ada")))
    assert set(reward.components) == set(table.measured()) == measured


async def test_the_total_is_the_weighted_sum():
    table = RewardConfig(components={"exact_match": 1.0, "format": 0.25, "tool_calls": -0.1})
    reward = await Scorer(table).score(request(CALL, CALL, answered("Ada Lovelace")))
    assert reward.total == pytest.approx(1.0 + 0.25 - 0.2)


@pytest.mark.parametrize(
    ("turns", "total"),
    [
        ((CALL, answered("Ada Lovelace")), 1.0),
        ((CALL, answered("Babbage")), 0.0),
        (("plain", answered("Ada Lovelace")), -0.5),
        (("plain", "text"), -1.0),
    ],
)
async def test_the_papers_rule(turns: tuple[str, ...], total: float):
    assert (await Scorer(RewardConfig(rule="paper")).score(request(*turns))).total == total


async def test_only_the_last_turn_answers():
    reward = await Scorer(RewardConfig()).score(request(answered("Ada Lovelace"), CALL))
    assert reward.prediction is None
    assert reward.total == 0.0


async def test_the_answer_is_what_the_pattern_of_the_environment_finds():
    turn = "<answer>no</answer> So the answer is: Babbage.\nThe answer is: Ada Lovelace."
    components = {"exact_match": 1.0, "answered": 0.0}
    reader = TurnReader(answer_pattern=r"answer is:\s*([^.]+)\.")
    scorer = Scorer(RewardConfig(components=components), reader)
    reward = await scorer.score(request(turn))
    assert reward.prediction == "Ada Lovelace"
    assert reward.total == 1.0
    without = await scorer.score(request(answered("Ada Lovelace")))
    assert (without.prediction, without.components["answered"]) == (None, 0.0)


async def test_a_truncated_interaction_is_scored_as_it_stands():
    text = "<think>so</think><answer>Ada Lovelace</answer> and fur"
    table = RewardConfig(components={"exact_match": 1.0, "format": 0.0})
    reward = await Scorer(table).score(request(text, status="TRUNCATED"))
    assert reward.total == 1.0
    assert reward.components["format"] == 0.5


async def test_a_failed_interaction_has_no_reward():
    with pytest.raises(ValueError, match="an outage is not the model's failure"):
        await Scorer(RewardConfig()).score(request("x", status="FAILED"))


@pytest.mark.parametrize("answers", [None, [], "Ada", ["Ada", 7]])
async def test_a_payload_without_usable_answers_is_named(answers: Any):
    payload = {} if answers is None else {"answers": answers}
    with pytest.raises(ValueError, match="payload has answers = "):
        await Scorer(RewardConfig()).score(request(answered("x"), payload=payload))


UNFIT: list[Any] = [None, [], [42], {"a": 1}, "x", 3, [["a", "b"]], ["x", None]]


@pytest.mark.parametrize("answers", UNFIT)
@pytest.mark.parametrize("name", ["exact_match", "f1", "substring_match"])
async def test_what_is_named_fails_there_even_with_weight_0(name: str, answers: Any):
    scorer = Scorer(RewardConfig(components={"answered": 1.0, name: 0.0}))
    with pytest.raises(ValueError, match="payload has answers = "):
        await scorer.score(request(answered("x"), payload={"answers": answers}))


@pytest.mark.parametrize("rule", ["paper", "weighted"])
async def test_an_empty_answer_earns_nothing_where_the_right_choice_is_a(rule: Any):
    scorer = Scorer(RewardConfig(rule=rule))
    payload = {"answers": ["A"]}
    for answer, total in (("", 0.0), ("the", 0.0), ("B", 0.0), ("A", 1.0), ("(A)", 1.0)):
        assert (await scorer.score(request(answered(answer), payload=payload))).total == total


async def test_tasks_without_answers_score_by_the_components_that_need_none():
    reward = await Scorer(RewardConfig(components={"format": 1.0})).score(
        request(answered("x"), payload={"tests": "assert True"})
    )
    assert reward.components == {"format": 1.0}


USER_CODE = """
import asyncio, time

def length(request):
    return len(request.turns[-1].text)

async def judged(request):
    await asyncio.sleep(0)
    return 0.5

def broken(request):
    raise KeyError("tests")

def wordy(request):
    return "good"

def undefined(request):
    return float("nan")

def explained(request):
    return 0.5, "the year\\x1b is missing" + "!" * 3000

def half_explained(request):
    return 0.5, 3

async def slow(request):
    await asyncio.Event().wait()

constant = 3
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_rewards"


async def test_users_components_are_functions_or_coroutines_kept_by_their_name(plugin: str):
    names = {f"{plugin}:length": 0.01, f"{plugin}:judged": 2.0}
    reward = await Scorer(RewardConfig(components=names)).score(request("12345"))
    assert reward.components[f"{plugin}:length"] == 5.0
    assert reward.total == pytest.approx(0.05 + 1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "raised KeyError: 'tests'"),
        ("wordy", "returned 'good'; it must return a finite number"),
        ("undefined", "returned nan"),
        ("half_explained", "returned 3 beside the number; it must be a text that says why"),
    ],
)
async def test_a_failing_component_is_named(plugin: str, name: str, message: str):
    table = RewardConfig(components={f"{plugin}:{name}": 1.0})
    with pytest.raises(ComponentError, match=f"{plugin}:{name}.*{message}"):
        await Scorer(table).score(request("x"))


async def test_a_component_may_say_why(plugin: str):
    names = {f"{plugin}:explained": 1.0, f"{plugin}:length": 1.0}
    reward = await Scorer(RewardConfig(components=names)).score(request("12345"))
    assert reward.total == 5.5
    ((name, why),) = reward.reasons.items()
    assert name == f"{plugin}:explained"
    assert why.startswith("the year\\x1b is missing!!!")
    assert len(why) < 2100


async def test_a_slow_component_is_named_with_its_limit(plugin: str):
    table = RewardConfig(components={f"{plugin}:slow": 1.0}, component_timeout_s=0.05)
    message = rf"{plugin}:slow.*did not answer within 0\.05 s; raise reward\.component_timeout_s"
    with pytest.raises(ComponentError, match=message):
        await Scorer(table).score(request("x"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards:missing", "has no missing"),
        ("my_rewards:constant", "is not a function"),
        ("nowhere_at_all:f", r"No module .* run\.plugins"),
    ],
)
def test_a_component_that_cannot_be_loaded_is_explained(plugin: str, name: str, message: str):
    with pytest.raises(ValueError, match=message):
        Scorer(RewardConfig(components={name: 1.0}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"components": {"exactmatch": 1.0}}, "did you mean 'exact_match'?"),
        ({"components": {"zzz": 1.0}}, "the built-in ones are exact_match, f1,"),
        ({"components": {"f1": 0.0}}, "gives every trajectory reward 0"),
        ({"rule": "paper", "components": {"f1": 1.0}}, "gives some to f1"),
        ({"rule": "papre"}, "'weighted' or 'paper'"),
        ({"weights": {}}, "weights"),
    ],
)
def test_a_wrong_table_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValidationError) as caught:
        RewardConfig(**values)
    assert message in str(caught.value)


def test_a_trajectory_is_scored_by_its_turns_and_payload():
    call = ToolCallRecord(end_token_index=3, tool="search", status="malformed")
    seen = request_of(trajectory(answer="Ada", calls=[call]))
    assert seen.payload == {"answers": ["Ada"]}
    assert [turn.num_calls for turn in seen.turns] == [1]
    assert seen.turns[0].text == "<think>I know.</think><answer>Ada</answer>"


async def test_a_trajectory_cut_before_its_first_turn_scores_as_an_empty_turn():
    cut = trajectory(
        rollout_task(),
        num_sampled=0,
        turns=[],
        status="TRUNCATED",
        version_spans=[],
    )
    reward = await Scorer(RewardConfig()).score_trajectory(cut)
    assert (reward.total, reward.prediction) == (0.0, None)


# --- HTTP ----------------------------------------------------------------------------------------


def client(table: RewardConfig) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(Scorer(table)), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://reward")


async def test_score_answers_a_reward():
    async with client(RewardConfig()) as http:
        body = request(CALL, answered("Ada Lovelace")).model_dump_json()
        response = await http.post("/score", content=body)
        health = await http.get("/healthz")
    reward = Reward.model_validate_json(response.content)
    assert (reward.total, reward.prediction) == (1.0, "Ada Lovelace")
    assert health.json()["status"] == "ok"


async def test_score_refuses_what_it_cannot_score(plugin: str):
    table = RewardConfig(components={"exact_match": 1.0, f"{plugin}:broken": 0.0})
    async with client(table) as http:
        extra = await http.post("/score", json={"payload": {}, "turns": [{"text": ""}], "x": 1})
        empty = await http.post("/score", json={"payload": {}, "turns": []})
        answers = await http.post("/score", json={"payload": {}, "turns": [{"text": ""}]})
        broken = await http.post(
            "/score", json={"payload": {"answers": ["a"]}, "turns": [{"text": ""}]}
        )
    assert [r.status_code for r in (extra, empty, answers, broken)] == [422, 422, 422, 500]
    assert "x: Extra inputs are not permitted (got 1)" in extra.json()["detail"]
    assert "turns: List should have at least 1 item" in empty.json()["detail"]
    assert "payload has answers = None" in answers.json()["detail"]
    assert "raised KeyError" in broken.json()["detail"]


async def test_a_value_outside_its_declared_range_is_an_error(plugin: str):
    name = f"{plugin}:length"
    inside = RewardConfig(components={name: 1.0}, ranges={name: (0.0, 5.0)})
    assert (await Scorer(inside).score(request("12345"))).total == 5.0
    with pytest.raises(ComponentError, match=r"returned 6, outside its declared range \[0, 5\]"):
        await Scorer(inside).score(request("123456"))


def test_a_range_is_of_a_component_and_the_right_way_round():
    with pytest.raises(
        ValidationError, match="names 'f1', which is not one of your own components"
    ):
        RewardConfig(ranges={"f1": (0.0, 1.0)})
    with pytest.raises(ValidationError, match=r"\[2, 1\]; the first number must not be"):
        RewardConfig(components={"a:b": 1.0}, ranges={"a:b": (2.0, 1.0)})


def test_the_number_of_calls_must_be_that_of_the_calls_given():
    with pytest.raises(ValidationError, match=r"num_calls \(2\) must be the number of calls \(1\)"):
        ScoreTurn.model_validate({"text": "", "num_calls": 2, "calls": [{"tool": "search"}]})


async def test_calls_reach_the_components():
    call = ToolCallRecord(
        end_token_index=4, tool="search", arguments={"query": "a"}, status="ok", latency_ms=1.0
    )
    repeated = request_of(trajectory(calls=[call, call]))
    reward = await Scorer(RewardConfig(components={"tool_efficiency": 1.0})).score(repeated)
    assert reward.components["tool_efficiency"] == 0.5


async def test_score_takes_numbers_that_are_written_as_numbers():
    async with client(RewardConfig()) as http:
        for wrong in (True, "1"):
            body = {"payload": {}, "turns": [{"text": "", "num_calls": wrong}]}
            answer = await http.post("/score", json=body)
            assert answer.status_code == 422
            assert "turns.0.num_calls: Input should be a valid integer" in answer.json()["detail"]


async def test_score_is_described_with_its_body_its_answer_and_what_can_go_wrong():
    async with client(RewardConfig()) as http:
        described = (await http.get("/openapi.json")).json()
    post = described["paths"]["/score"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    answer = post["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert (body, answer) == ("#/components/schemas/ScoreRequest", "#/components/schemas/Reward")
    assert {"413", "422", "500"} <= post["responses"].keys()
    assert "ScoreTurn" in described["components"]["schemas"]


async def test_other_requests_are_answered_while_a_long_text_is_scored(
    monkeypatch: pytest.MonkeyPatch,
):
    others_answered = threading.Event()

    def measure(_: ScoreRequest) -> float:
        return float(others_answered.wait(30.0))

    monkeypatch.setitem(BUILT_IN, "answered", measure)
    scorer = Scorer(RewardConfig(components={"answered": 1.0}))
    transport = httpx.ASGITransport(create_app(scorer))
    async with httpx.AsyncClient(transport=transport, base_url="http://reward") as client:
        body = request(answered("Ada")).model_dump_json()
        scored = asyncio.create_task(client.post("/score", content=body))
        await asyncio.sleep(0)
        assert (await client.get("/healthz")).status_code == 200
        others_answered.set()
        reward = Reward.model_validate_json((await scored).content)
    assert reward.components["answered"] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "<|a|>" * 40_000,
        "<|a|>" * 40_000 + "x",
        "</s> " * 40_000,
        answered("a b " * 40_000),
        "<answer>" * 40_000,
    ],
    ids=["ends", "no end", "closing tags", "a long answer", "open answers"],
)
async def test_the_time_of_scoring_grows_with_the_text_and_no_faster(text: str):
    asked = request(text, text, payload={"answers": ["a"] * 2000})
    everything = RewardConfig(components=dict.fromkeys(BUILT_IN, 1.0))
    began = time.monotonic()
    await Scorer(everything).score(asked)
    # A fraction of a second; what is quadratic takes a minute and more.
    assert time.monotonic() - began < 10.0


async def test_a_body_with_a_million_mistakes_is_refused_at_the_first():
    transport = httpx.ASGITransport(create_app(Scorer(RewardConfig())))
    async with httpx.AsyncClient(transport=transport, base_url="http://reward") as client:
        turns = await client.post("/score", json={"payload": {}, "turns": [{}] * 1_000_000})
        keys = await client.post("/score", json={f"k{i}": 0 for i in range(2000)})
        some = await client.post("/score", json={f"k{i}": 0 for i in range(50)})
    assert [answer.status_code for answer in (turns, keys, some)] == [422] * 3
    assert "turns.0.text: Field required" in turns.json()["detail"]
    assert "turns.1" not in turns.json()["detail"]
    # The two fields that lack are problems too.
    assert "2002 problems" in keys.json()["detail"]
    assert "; 32 more problems; correct" in some.json()["detail"]
    assert len(json.dumps(some.json())) < 4000


async def test_one_component_scores_a_branch_that_has_not_ended(plugin: str):
    name = f"{plugin}:length"
    table = RewardConfig(components={"exact_match": 1.0, name: 0.0, "tool_calls": 0.0})
    branch = json.loads(request("12345", payload={}, status="TRUNCATED").model_dump_json())
    async with client(table) as http:
        answers = [
            await http.post("/value", json={"component": component, "interaction": branch})
            for component in (name, "tool_calls", "exact_match", "format")
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 422, 422]
    assert [answer.json() for answer in answers[:2]] == [
        {"value": 5.0, "tokens": 0, "version": ""},
        {"value": 0.0, "tokens": 0, "version": ""},
    ]
    # What compares with the right answer knows it, and what is not configured is not run.
    for refused in answers[2:]:
        assert f"those of reward.components that can: {name}, tool_calls" in refused.text


def test_what_is_scored_of_several_agents_is_what_the_main_one_wrote():
    several = request_of(trajectory(**three_lineages()), tokens=True)
    assert [turn.text for turn in several.turns] == ["ask"]
    assert several.token_ids == [0, 1, 2]  # the state before its last token
