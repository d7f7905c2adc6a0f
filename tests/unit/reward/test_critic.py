"""The component critic against a scripted HTTP server: what is asked, what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from agent_r1.reward import model_server
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import ComponentError, Scorer
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn
from tests.support.builders import trajectory
from tests.support.scripted_server import ScriptedServer


def values(*probs: float) -> dict[str, Any]:
    return {"data": [{"index": 0, "probs": list(probs)}], "usage": {"total_tokens": 3}}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer((200, values(-0.25)))
    yield server
    server.stop()


@pytest.fixture
async def scorer(server: ScriptedServer) -> AsyncIterator[Scorer]:
    table = {"url": server.url.removesuffix("/v1"), "model": "critic-1"}
    components = {"answered": 1.0, "critic": 0.0}
    config = {"components": components, "servers": {"critic": table}}
    made = Scorer(RewardConfig.model_validate(config))
    yield made
    await made.close()


def interaction(*token_ids: int) -> ScoreRequest:
    return ScoreRequest(payload={}, turns=[ScoreTurn(text="")], token_ids=list(token_ids))


async def test_the_value_of_a_branch_is_that_of_the_state_after_its_tokens(
    server: ScriptedServer, scorer: Scorer
):
    found = await scorer.value("critic", interaction(5, 6, 7))
    assert (found.value, found.tokens, found.version) == (-0.25, 3, "critic-1")
    [body] = server.bodies
    assert body == {
        "path": "/classify",
        "model": "critic-1",
        "input": [5, 6, 7],
        "add_special_tokens": False,
        "use_activation": False,
    }


async def test_equal_states_are_asked_about_once(server: ScriptedServer, scorer: Scorer):
    for tokens in ((5, 6), (5, 6), (6, 5)):
        await scorer.value("critic", interaction(*tokens))
    assert [body["input"] for body in server.bodies] == [[5, 6], [6, 5]]


async def test_a_finished_trajectory_is_valued_before_its_last_token(
    server: ScriptedServer, scorer: Scorer
):
    done = trajectory()
    reward = await scorer.score_trajectory(done)
    assert reward.components["critic"] == -0.25
    [body] = server.bodies
    end = len(done.token_ids) - bool(done.turns and done.turns[-1].end == len(done.token_ids))
    assert body["input"] == done.token_ids[:end].tolist()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, values(0.1, 0.9)), "no value of one state; serve what `agent-r1 export --critic`"),
        ((200, {"choices": []}), "no value of one state"),
        (
            (404, {"detail": "no such model"}),
            r"refuses the request with 404.*\[reward.servers.critic\]",
        ),
        ((503, {}), "says 503"),
    ],
)
async def test_what_is_no_value_is_an_error_and_never_a_score(
    server: ScriptedServer,
    scorer: Scorer,
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[int, Any],
    message: str,
):
    server.answers = [answer]
    # The next try would come after all patience, so that a server which is away is given up now.
    monkeypatch.setattr(model_server, "FIRST_DELAY_S", 1000.0)
    with pytest.raises(ComponentError, match=message):
        await scorer.value("critic", interaction(5))


async def test_texts_alone_have_no_value(scorer: Scorer):
    with pytest.raises(ComponentError, match=r"no token_ids.*choose another component"):
        await scorer.value("critic", interaction())
