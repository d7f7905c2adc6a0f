"""The component `reward_model`: the probability that an interaction is right, by a trained model.

`agent-r1 train-reward` makes the model, and any server with OpenAI's chat API that gives
log-probabilities serves it (`vllm serve`). model_server.py asks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from agent_r1.reward.config import RewardModelConfig
from agent_r1.reward.model_server import ChatServer
from agent_r1.text.verdicts import BAD, GOOD, count_in_dialogue, verdict_dialogue
from agent_r1_proto.rewards import ScoreRequest

TABLE = "reward.servers.reward_model"
TOP_TOKENS = 20
"""Tokens whose log-probability is asked for: the most that vLLM gives unless told otherwise."""


class RewardModel:
    """Scores interactions by the reward model's next token.

    Args:
        config: `[reward.servers.reward_model]`.
        patience_s: how long a server that is away is asked again, in seconds.
    """

    def __init__(self, config: RewardModelConfig, patience_s: float) -> None:
        self._config = config
        self.server = ChatServer(config, TABLE, patience_s)

    async def score(self, request: ScoreRequest) -> float:
        """Return the probability of the good verdict among the two, from 0.0 to 1.0.

        Raises:
            ServerAwayError: the server did not answer in time.
            ValueError: the request has no prompt, the server refuses it, or says neither verdict.
        """
        if not request.prompt:
            raise ValueError(
                "the request has no prompt, which the component reward_model reads; send the "
                "messages that the model was asked with"
            )
        messages = verdict_dialogue(
            request.prompt, request.turns, self._config.question, thoughts=self._config.thoughts
        )
        count = count_in_dialogue(request.prompt, request.turns, thoughts=self._config.thoughts)
        key = json.dumps([[message.role, message.text()] for message in messages])

        async def ask() -> float:
            self.server.num_spelled_out += count
            choice = await self.server.complete(
                messages, max_tokens=1, logprobs=True, top_logprobs=TOP_TOKENS
            )
            return _read_verdict(choice)

        return await self.server.score_once(key, ask)


def _read_verdict(choice: Mapping[str, Any]) -> float:
    try:
        tokens = choice["logprobs"]["content"][0]["top_logprobs"]
        good, bad = (_probability(tokens, word) for word in (GOOD, BAD))
    except (LookupError, TypeError, ValueError) as exc:
        raise ValueError(
            f"the reward model's server answers {choice!r:.300}, without the log-probabilities of "
            f"the next token; use a server that gives them, and see {TABLE}.url"
        ) from exc
    if good + bad == 0.0:
        said = ", ".join(repr(token.get("token")) for token in tokens[:5])
        raise ValueError(
            f"the reward model's next tokens are {said} and so on, neither {GOOD!r} nor {BAD!r}; "
            f"serve a model that `agent-r1 train-reward` made, or correct {TABLE}.model"
        )
    return good / (good + bad)


def _probability(tokens: Iterable[Mapping[str, Any]], word: str) -> float:
    """Return the probability of the tokens with which a word may begin."""
    return math.fsum(
        math.exp(float(token["logprob"]))
        for token in tokens
        if (text := str(token["token"]).strip()) and word.startswith(text)
    )
