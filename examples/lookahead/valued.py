"""The environment of turn_credit.toml, which rewards turns for what they are worth.

turn_values.toml trains the model that it asks, on continuations of the base model's turns.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from sources import AllowedCalls
from transformers import AutoModelForCausalLM

from agent_r1.learner.reward_model.data import JudgedEpisode, VerdictEncoder
from agent_r1.learner.sft.loss_mask import DialogueEncoder
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn
from agent_r1.text.verdicts import BAD, GOOD, QUESTION
from agent_r1_proto.rewards import ScoreCall, ScoreTurn
from agent_r1_proto.tasks import Task

MAX_CONTEXT = 512


class TurnValues:
    """What turns are worth, by a model of `agent-r1 train-reward` in this process.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: str) -> None:
        self._encoder = VerdictEncoder(DialogueEncoder(folder), QUESTION, MAX_CONTEXT)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def value(self, task: Task, turns: list[ScoreTurn]) -> float:
        """Return the probability that the turns lead to the right answer."""
        asked = JudgedEpisode(task.id, "COMPLETED", task.messages(), turns, [], 1.0)
        good, bad = (self._encoder.sample(asked, len(turns), v, 1.0) for v in (GOOD, BAD))
        if good is None or bad is None:
            raise ValueError(f"task {task.id!r}: more than {MAX_CONTEXT} tokens")
        ends = [int(good.token_ids[-1]), int(bad.token_ids[-1])]
        with torch.no_grad():
            logits = self._model(torch.tensor(good.token_ids[None, :-1])).logits[0, -1, ends]
        return float(torch.sigmoid(logits[0] - logits[1]))


_values = cache(TurnValues)


class ValuedTurns(AllowedCalls):
    """Rewards each turn but the last with its value less that of the turn before.

    The last one has the outcome.

    Args:
        task: the question.
        model: folder of the turn values.
    """

    def __init__(self, task: Task, model: str) -> None:
        super().__init__(task)
        self._model = model
        self._turns: list[ScoreTurn] = []
        self._value = 0.0

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        """Value the turn as it is written, before its calls were run."""
        step = await super().step(turn, results)
        seen = [*self._turns, ScoreTurn(text=turn.text)]
        value = await asyncio.to_thread(_values(self._model).value, self.task, seen)
        calls = [
            ScoreCall(tool=r.name, arguments=r.arguments, status=r.status, text=r.text)
            for r in results
        ]
        self._turns.append(ScoreTurn(text=turn.text, num_calls=len(calls), calls=calls))
        gain, self._value = value - self._value, value
        return step if step.done else replace(step, turn_reward=gain)
