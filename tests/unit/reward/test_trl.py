"""Reward functions of TRL as components."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1 import ScoreRequest, trl_reward
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import ComponentError, Scorer
from agent_r1_proto.rewards import ScoreTurn
from agent_r1_proto.tasks import ChatMessage
from tests.support.builders import trajectory

REQUEST = ScoreRequest(
    payload={"solution": "4", "level": 2},
    prompt=[ChatMessage(role="system", content="s"), ChatMessage(role="user", content="2 + 2?")],
    turns=[ScoreTurn(text="let me see"), ScoreTurn(text="4")],
)


def test_messages_and_columns_arrive_as_trl_gives_them():
    seen: dict[str, Any] = {}

    def accuracy(
        prompts: Any, completions: Any, solution: list[str], **columns: Any
    ) -> list[float]:
        """Compares."""
        seen.update(prompts=prompts, completions=completions, columns=columns)
        contents = [completion[-1]["content"] for completion in completions]
        return [float(c == s) for c, s in zip(contents, solution, strict=True)]

    component = trl_reward(accuracy)
    assert component(REQUEST) == 1.0
    assert (component.__name__, component.__doc__) == ("accuracy", "Compares.")
    assert seen["prompts"][0][-1] == {"role": "user", "content": "2 + 2?"}
    assert seen["completions"] == [
        [
            {"role": "assistant", "content": "let me see"},
            {"role": "assistant", "content": "4"},
        ]
    ]
    assert seen["columns"] == {"level": [2]}


def test_texts_are_given_where_the_function_reads_texts():
    def length(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(p) + len(c)) for p, c in zip(prompts, completions, strict=True)]

    # "2 + 2?" has 6 characters; "let me see", a line end and "4" have 10 + 1 + 1
    assert trl_reward(length, messages=False)(REQUEST) == 18.0


def test_none_counts_nothing():
    assert trl_reward(lambda completions, **_: [None])(REQUEST) == 0.0


@pytest.mark.parametrize("value", [[1.0, 2.0], 1.0, [], "x"])
def test_what_is_no_list_of_one_is_an_error(value: Any):
    with pytest.raises(ValueError, match="returns a list of one"):
        trl_reward(lambda completions, **_: value)(REQUEST)


def test_a_column_that_the_payload_lacks_is_named():
    def needs(completions: Any, answer: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"needs asks for the column 'answer'.* level, solution"):
        trl_reward(needs)(REQUEST)


def of_one_number(value: Any) -> Any:
    return trl_reward(lambda completions, **_: value)(REQUEST)


@pytest.mark.parametrize(
    "value",
    [
        np.array([0.5]),
        np.array([0.5], np.float32),
        torch.tensor([0.5]),
        torch.tensor([0.5], requires_grad=True),
        (0.5,),
        [np.float32(0.5)],
        [torch.tensor(0.5)],
    ],
)
def test_an_array_or_tensor_of_one_number_counts(value: Any):
    assert of_one_number(value) == 0.5
    assert type(of_one_number(value)) is float


@pytest.mark.parametrize(
    "value",
    [np.array([0.5, 1.0]), np.array([[0.5, 1.0]]), np.float64(0.5), torch.tensor(0.5), [[]]],
)
def test_an_array_of_another_shape_does_not(value: Any):
    with pytest.raises(ValueError, match="returns a list of one"):
        of_one_number(value)


class AsyncJudge:
    async def __call__(self, completions: Any, **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [0.25]


async def test_async_functions_are_awaited_by_the_scorer(monkeypatch: pytest.MonkeyPatch):
    async def judged(completions: Any, **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [0.5]

    module = ModuleType("trl_rewards")
    module.judged, module.object = trl_reward(judged), trl_reward(AsyncJudge())  # type: ignore
    monkeypatch.setitem(sys.modules, "trl_rewards", module)
    names = {"trl_rewards:judged": 1.0, "trl_rewards:object": 1.0}
    scorer = Scorer(RewardConfig(rule="weighted", components=names))
    # 0.5 of the function and 0.25 of the object
    assert (await scorer.score(REQUEST)).total == 0.75


async def test_completion_ids_are_the_tokens_that_were_sampled(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    def length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    module = ModuleType("trl_rewards")
    module.length = trl_reward(length)  # type: ignore
    monkeypatch.setitem(sys.modules, "trl_rewards", module)
    scorer = Scorer(RewardConfig(rule="weighted", components={"trl_rewards:length": 1.0}))
    done = trajectory()
    sampled = done.token_ids[done.action_mask].tolist()
    assert (await scorer.score_trajectory(done)).total == len(sampled) > 0
    assert seen == [sampled]
    with pytest.raises(
        ComponentError, match="asks for completion_ids, and this interaction is text"
    ):
        await scorer.score(REQUEST)


def test_log_metric_and_log_extra_are_given(caplog: pytest.LogCaptureFixture):
    def logs(completions: Any, log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("short", 1.0)
        log_extra("length", [3])
        return [0.5]

    with caplog.at_level("DEBUG", logger="agent_r1.reward.trl"):
        assert trl_reward(logs)(REQUEST) == 0.5
    assert "name=short value=1.0" in caplog.text
    assert "name=length values=[3]" in caplog.text


def test_what_only_the_trainer_has_is_called_so():
    def curriculum(completions: Any, trainer_state: Any) -> list[float]:
        return [float(trainer_state.global_step)]

    with pytest.raises(
        ValueError, match=r"curriculum asks for trainer_state, which is of TRL's trainer, not a col"
    ):
        trl_reward(curriculum)(REQUEST)
    # A task may have a column of this name all the same.
    payload = {"trainer_state": 3}
    named = REQUEST.model_copy(update={"payload": payload})
    assert trl_reward(lambda trainer_state, **_: trainer_state)(named) == 3.0
