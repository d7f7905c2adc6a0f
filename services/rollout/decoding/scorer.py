"""Scorer of the branches of a search: a component of the reward service, asked over HTTP.

decoding/search.py hands in an interaction as far as it has come. The payload is not sent: a scorer
that could read the answer there would find it where a real one would not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import httpx
from pydantic import JsonValue

from agent_r1.rollout.turns import AttemptFailedError, Branch
from agent_r1.runtime.http import MAX_DETAIL_CHARS
from agent_r1.runtime.http.token import RunToken, token_headers
from agent_r1_proto.messages import Message
from agent_r1_proto.rewards import (
    Reward,
    ScoreRequest,
    Value,
    ValueRequest,
    score_turns,
    valued_tokens,
)

SCORE_TIMEOUT_S = 300.0
"""Longest wait for one score; the reward service has limits of its own, which are shorter."""


MAX_CONNECTIONS = 512
"""Connections to a reward service, which takes 2,048 from everybody; more requests wait for one of
them."""


class BranchScorer(Protocol):
    """Says how good branches are."""

    async def value(self, component: str, interaction: ScoreRequest) -> Value:
        """Return what a component says of an interaction; more is better.

        Raises:
            AttemptFailedError: it says nothing.
        """
        ...

    async def outcome(self, interaction: ScoreRequest) -> float:
        """Return the reward of an interaction that has ended; it knows the payload.

        Raises:
            AttemptFailedError: there is none.
        """
        ...


class RewardService:
    """Asks a reward service.

    Args:
        url: `rollout.scorer_url`.
        token: sent with every request.
    """

    def __init__(self, url: str, token: RunToken | None) -> None:
        self._url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            timeout=SCORE_TIMEOUT_S,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
            trust_env=False,
            headers=token_headers(token),
        )

    async def value(self, component: str, interaction: ScoreRequest) -> Value:
        """Return what a component says of an interaction.

        Raises:
            AttemptFailedError: the service did not answer, or the component failed.
        """
        body = ValueRequest(component=component, interaction=interaction)
        return Value.model_validate_json(await self._post("/value", body))

    async def outcome(self, interaction: ScoreRequest) -> float:
        """Return the reward of an interaction that has ended.

        Raises:
            AttemptFailedError: the service did not answer, or a component failed.
        """
        return Reward.model_validate_json(await self._post("/score", interaction)).total

    async def _post(self, path: str, body: Message) -> bytes:
        url, headers = f"{self._url}{path}", {"content-type": "application/json"}
        try:
            answer = await self._http.post(url, content=body.model_dump_json(), headers=headers)
        except httpx.TransportError as exc:
            raise AttemptFailedError(
                f"scorer_unreachable: {url}: {type(exc).__name__}: {exc}"
            ) from exc
        if answer.status_code != httpx.codes.OK:
            said = answer.text[:MAX_DETAIL_CHARS]
            raise AttemptFailedError(f"scorer_error: {url}: {answer.status_code}: {said}")
        return answer.content

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def as_interaction(branch: Branch, payload: Mapping[str, JsonValue] | None = None) -> ScoreRequest:
    """Return a branch as a scorer sees it; one that goes on counts as TRUNCATED.

    Args:
        branch: an interaction as far as it has come.
        payload: of its task, for who may know the answer.
    """
    return ScoreRequest(
        prompt=branch.rollout.task.messages(),
        payload=dict(payload or {}),
        turns=score_turns(branch.turns),
        token_ids=valued_tokens(branch.token_ids, branch.segment_starts, branch.turns),
        status="TRUNCATED" if branch.ended is None else branch.ended[0],
    )
