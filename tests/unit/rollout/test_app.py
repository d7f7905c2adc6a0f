"""The rollout server's routes: what they take, and that they say so."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import httpx
import pytest

from agent_r1.rollout.app import create_app
from agent_r1.rollout.weight_versions import WeightVersions
from agent_r1.weights.file import FileFetcher
from agent_r1_proto.registry import Registry
from agent_r1_proto.weights import CanaryReply
from tests.support.fakes import FakePolicy


@pytest.fixture
async def client():
    policy = FakePolicy([[1]], eos_token_ids=[1])
    registry = cast(Registry, None)  # no request here gets as far as Redis
    versions = WeightVersions(policy, registry, FileFetcher(Path("/nowhere"), "run"))
    app = create_app(server_id="r1", policy=policy, versions=versions, in_flight=lambda: 3)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://rollout") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        (
            "load",
            {"version": 1},
            "the body is not a LoadRequest: manifest_location: Field required",
        ),
        (
            "load",
            {"manifest_location": "/m", "policy_version": True},
            "policy_version: Input should",
        ),
        ("load", {"manifest_location": "/m", "policy_version": "1"}, "(got '1')"),
        ("canary", {"token_ids": ["5", "6"]}, "token_ids.0: Input should be a valid integer"),
        ("canary", {"token_ids": [1]}, "token_ids: List should have at least 2 items"),
        ("canary", {"token_ids": [1, 2, 3], "prompt_starts": [2]}, "the prompt at 2 has 1 tokens"),
        ("canary", {"token_ids": [1, 2], "wanted": [0]}, "wanted names the first token"),
        ("canary", {"token_ids": [1, 2], "wanted": [2]}, "or one outside 0..1"),
        ("canary", {"token_ids": [1, 2, 3], "wanted": [2, 1]}, "wanted must rise"),
        (
            "canary",
            {"token_ids": [1, 2, 3, 4], "prompt_starts": [2], "wanted": [1]},
            "no token of one of the prompts",
        ),
    ],
)
async def test_a_wrong_body_is_answered_as_every_service_does(
    client: httpx.AsyncClient, path: str, body: dict[str, object], detail: str
):
    answer = await client.post(f"/weights/{path}", json=body)
    assert answer.status_code == 422
    assert answer.json().keys() == {"detail"}
    assert detail in answer.json()["detail"]


async def test_the_canary_scores_the_tokens_it_is_given(client: httpx.AsyncClient):
    answer = await client.post("/weights/canary", json={"token_ids": [5, 6, 7]})
    # The scripted policy scores a token as minus its id.
    assert CanaryReply.model_validate(answer.json()).logprobs == [-6.0, -7.0]


async def test_the_canary_scores_the_wanted_tokens_of_several_prompts(client: httpx.AsyncClient):
    # The prompts are 5 6 7 and 8 9; without `wanted`, all but their first tokens are scored.
    body = {"token_ids": [5, 6, 7, 8, 9], "prompt_starts": [3]}
    for wanted, logprobs in (([2, 4], [-7.0, -9.0]), ([], [-6.0, -7.0, -9.0])):
        answer = await client.post("/weights/canary", json={**body, "wanted": wanted})
        assert CanaryReply.model_validate(answer.json()).logprobs == logprobs


async def test_the_api_description_has_every_body_and_answer(client: httpx.AsyncClient):
    described = (await client.get("/openapi.json")).json()
    post = described["paths"]["/weights/load"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    answer = post["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert (body[-12:], answer[-10:]) == ("/LoadRequest", "/LoadReply")
    assert {"409", "413", "422", "503"} <= post["responses"].keys()
