"""POST /generate: the engine's door for those who run the rest of an interaction elsewhere."""

from __future__ import annotations

import httpx

from agent_r1_proto.generation import GeneratedPart, GenerateRequest
from tests.support.fakes import FakePolicy
from tests.support.rollout_bench import ANSWER, Bench, until

REQUEST = GenerateRequest(request_id="one", token_ids=[5, 6], max_tokens=100, seed=3)


def body(**changes: object) -> dict[str, object]:
    return REQUEST.model_dump(mode="json") | changes


def parts_of(text: str) -> list[GeneratedPart]:
    return [GeneratedPart.model_validate_json(line) for line in text.splitlines()]


async def test_tokens_come_as_they_are_sampled(bench: Bench):
    policy = bench.policy(ANSWER)
    async with bench.server(policy), httpx.AsyncClient(base_url=bench.url) as client:
        answer = await client.post("/generate", json=body())
        assert answer.headers["content-type"] == "application/x-ndjson"
        parts = parts_of(answer.text)
    sampled = [token for part in parts for token in part.token_ids]
    assert sampled == [*bench.chat.encode(ANSWER), bench.end_id]
    assert [part.finish_reason for part in parts[-2:]] == [None, "stop"]
    [asked] = policy.requests
    assert (asked.token_ids, asked.max_tokens, asked.temperature, asked.seed) == ([5, 6], 100, 1, 3)


async def test_tokens_come_together_where_they_may_wait(bench: Bench):
    policy = bench.policy(ANSWER)
    async with bench.server(policy), httpx.AsyncClient(base_url=bench.url) as client:
        parts = parts_of((await client.post("/generate", json=body(every_s=10))).text)
    first, rest = parts  # the first one does not wait, and the end does not
    length = len(bench.chat.encode(ANSWER)) + 1
    assert (len(first.token_ids), len(rest.token_ids)) == (1, length - 1)
    assert (first.finish_reason, rest.finish_reason) == (None, "stop")
    assert rest.split()[-1].finish_reason == "stop"
    assert GeneratedPart.joined(rest.split()) == rest
    assert [one.version_spans[0].start for one in rest.split()] == list(range(1, length))


async def test_a_caller_that_goes_away_aborts_its_request(bench: Bench):
    policy = bench.policy(ANSWER)
    policy.answering.clear()  # nothing is sent yet
    async with bench.server(policy), httpx.AsyncClient(base_url=bench.url) as client:
        async with client.stream("POST", "/generate", json=body()):
            await until(lambda: policy.streams == ["one"])
            twice = await client.post("/generate", json=body())
            assert (twice.status_code, "in flight" in twice.text) == (409, True)
        await until(lambda: policy.streams == [])


async def test_what_cannot_be_sampled_is_refused(bench: Bench):
    policy = bench.policy(ANSWER)
    async with bench.server(policy), httpx.AsyncClient(base_url=bench.url) as client:
        long = await client.post("/generate", json=body(token_ids=[5] * policy.max_context))
        none = await client.post("/generate", json=body(token_ids=[]))
        unknown = await client.post("/generate", json=body(top_k=3))
        policy.die("the engine was killed")
        dead = await client.post("/generate", json=body())
    assert (long.status_code, none.status_code, unknown.status_code) == (422, 422, 422)
    assert (dead.status_code, "the engine was killed" in dead.text) == (503, True)


async def test_an_engine_that_dies_in_the_middle_is_the_last_line(bench: Bench):
    async def dies(_: list[int], __: int) -> list[int]:
        policy.die("the engine was killed")
        return [5]

    policy = FakePolicy(dies, eos_token_ids=[bench.end_id])
    async with bench.server(policy), httpx.AsyncClient(base_url=bench.url) as client:
        [part] = parts_of((await client.post("/generate", json=body())).text)
    assert (part.finish_reason, "the engine was killed" in part.error) == (None, True)
