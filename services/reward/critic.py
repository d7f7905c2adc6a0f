"""The component `critic`: what a state is worth, says the critic of a PPO run.

`agent-r1 export --critic` writes it as a model that vLLM serves (`POST /classify`). It is asked
with the very tokens of the interaction, since these are what it was trained on. model_server.py
asks.
"""

from __future__ import annotations

import hashlib
import json

from agent_r1.reward.config import CriticConfig
from agent_r1.reward.model_server import ModelServer
from agent_r1_proto.rewards import ScoreRequest

TABLE = "reward.servers.critic"


class Critic:
    """Scores interactions by the value of the state that they have come to.

    Args:
        config: `[reward.servers.critic]`.
        patience_s: how long a server that is away is asked again, in seconds.
    """

    def __init__(self, config: CriticConfig, patience_s: float) -> None:
        self.server = ModelServer(config, TABLE, patience_s)

    async def score(self, request: ScoreRequest) -> float:
        """Return the value of the state after the request's tokens, in units of the reward.

        Raises:
            ServerAwayError: the server did not answer in time.
            ValueError: the request has no tokens, or the server refuses it or serves no critic.
        """
        token_ids = request.token_ids
        if not token_ids:
            raise ValueError(
                "the request has no token_ids, which the component critic reads; send the tokens "
                "of the interaction, or choose another component for texts alone"
            )
        key = hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()

        async def ask() -> float:
            return await self.server.post(
                "/classify",
                {"input": token_ids, "add_special_tokens": False, "use_activation": False},
                lambda answer: _only(answer["data"][0]["probs"]),
                "no value of one state; serve what `agent-r1 export --critic` wrote, and see "
                f"{TABLE}.url and {TABLE}.model",
            )

        return await self.server.score_once(key, ask)


def _only(values: list[float]) -> float:
    (value,) = values
    return float(value)
