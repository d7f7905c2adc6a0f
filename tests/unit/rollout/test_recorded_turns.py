"""What a trajectory keeps of its turns: what each says, and what the model read after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1_proto.parts import ImagePart, StoredImage, TextPart, shown_text
from agent_r1_proto.rewards import score_turns
from agent_r1_proto.tasks import ChatMessage, Task
from agent_r1_proto.tools import ToolCall, ToolResult
from agent_r1_proto.trajectory import Trajectory
from tests.support.builders import rollout_task
from tests.support.fakes import FakeToolServer, build_tokenizer, call_text
from tests.unit.rollout.loops import ANSWER, agent_loop

SEARCH = call_text(query="Ada")
IMAGE = ImagePart(media_type="image/png", data_base64="iVBORw0KGgo=")


class Guided(ToolEnv):
    """Shows something else than the results, says something, and tells rewards something."""

    sends_messages = True

    def __init__(self, task: Task, **changes: Any) -> None:
        super().__init__(task)
        self.changes = changes

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        step = await super().step(turn, results)
        return step if step.done else replace(step, **self.changes)


async def run(
    chat: ChatFormat, end_id: int, *turns: str, answer: Any = None, env: Any = None, **changes: Any
) -> Trajectory:
    def result(call: ToolCall) -> ToolResult:
        return answer or ToolResult(parts=[TextPart(text="found it")])

    async with (
        FakeToolServer(answer=result) as server,
        agent_loop(
            chat,
            end_id,
            turns or (SEARCH, ANSWER),
            server,
            env=env,
            make_env=lambda task: Guided(task, **changes),
        ) as built,
    ):
        return await built.loop.run(rollout_task())


def shown(trajectory: Trajectory) -> list[tuple[str, str, int | None]]:
    return [(r.role, shown_text(r.parts), r.call) for r in trajectory.turns[0].shown()]


async def test_a_turn_says_what_it_is(chat: ChatFormat, end_id: int):
    trajectory = await run(chat, end_id, f"<think>look</think>{SEARCH}", ANSWER)
    call, answer = trajectory.turns
    assert (call.well_formed, call.thought, call.answer) == (True, "look", None)
    assert call.said == f" {SEARCH}"  # with a space where the thought was
    assert (answer.well_formed, answer.thought, answer.answer) == (True, "done", "Ada")


async def test_results_shown_as_they_are_take_no_room_of_their_own(chat: ChatFormat, end_id: int):
    trajectory = await run(chat, end_id)
    assert [turn.replies for turn in trajectory.turns] == [None, None]
    assert shown(trajectory) == [("tool", "found it", 0)]


async def test_what_was_shown_in_place_of_a_result_is_kept(chat: ChatFormat, end_id: int):
    trajectory = await run(chat, end_id, observations=["found nothing"])
    assert shown(trajectory) == [("tool", "found nothing", 0)]
    assert trajectory.turns[0].calls[0].text() == "found it"


async def test_what_the_limits_left_is_kept(chat: ChatFormat, end_id: int):
    env = {"max_tool_response_tokens": 16}
    trajectory = await run(chat, end_id, env=env, observations=["much " * 60])
    ((role, text, call),) = shown(trajectory)
    assert (role, call) == ("tool", 0)
    assert text.endswith("[truncated]")
    assert len(text) < 200
    assert text in chat.decode(trajectory.token_ids.tolist())


async def test_a_message_of_the_environment_and_its_data_are_kept(end_id: int):
    tokenizer = build_tokenizer()
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id], reply_roles=("tool", "user"))
    trajectory = await run(chat, end_id, message="Go on.", data={"steps": 1})
    assert shown(trajectory) == [("tool", "found it", 0), ("user", "Go on.", None)]
    assert trajectory.turns[0].data == {"steps": 1}
    request_turn = score_turns(trajectory.turns)[0]
    assert request_turn.data == {"steps": 1}
    assert [r.content for r in request_turn.shown()] == ["found it", "Go on."]


async def test_an_image_of_a_tool_is_refused_by_name(chat: ChatFormat, end_id: int):
    answer = ToolResult(parts=[TextPart(text="see"), IMAGE])
    trajectory = await run(chat, end_id, answer=answer)
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith("image_refused: an image (image/png) cannot be shown")
    text, image = trajectory.turns[0].calls[0].parts
    assert text == TextPart(text="see")
    # sha256 of the eight bytes of a PNG's signature
    assert image == StoredImage.of(IMAGE)


async def test_an_image_of_a_task_is_refused_by_name(chat: ChatFormat, end_id: int):
    prompt = [ChatMessage(role="user", content=[TextPart(text="?"), StoredImage.of(IMAGE)])]
    async with agent_loop(chat, end_id, [ANSWER]) as built:
        trajectory = await built.loop.run(rollout_task(task=Task(id="t", prompt=prompt)))
    assert (trajectory.status, trajectory.written_version()) == ("FAILED", "4.0")
    assert trajectory.reason.startswith("image_refused: ")


async def test_an_environment_that_describes_an_image_shows_text(chat: ChatFormat, end_id: int):
    answer = ToolResult(parts=[TextPart(text="see"), IMAGE])
    trajectory = await run(chat, end_id, answer=answer, observations=["a cat"])
    assert trajectory.status == "COMPLETED"
    assert shown(trajectory) == [("tool", "a cat", 0)]


@pytest.mark.parametrize("data", [{1, 2}, float("nan"), object(), {1: 2}, {"x": (1,)}])
async def test_data_that_is_no_json_is_refused(chat: ChatFormat, end_id: int, data: Any):
    trajectory = await run(chat, end_id, data=data)
    assert trajectory.status == "FAILED"
    assert "it must be JSON" in trajectory.reason


TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if OPENS -%}{{- '<think>\n' -}}{%- endif -%}{%- endif -%}"
)


@pytest.mark.parametrize(
    ("turns", "paper", "math"),
    [
        ([f"look</think>{SEARCH}", "found</think><answer>Ada</answer>"], 1.0, 1.0),
        # Format: no turn before the last, so half of it is right: 0.5 - 1.
        (["I could write <answer>Ada</answer> but let me go on"], -0.5, 0.0),
        ([r"so perhaps \boxed{Ada} but let me check"], -0.5, 0.0),
        ([f"look</think>{SEARCH}", "I never <answer>Ada</answer>"], -0.5, 0.0),
        ([f"never {SEARCH}", "found</think><answer>Ada</answer>"], -0.5, 1.0),
    ],
)
async def test_rewards_are_the_same_whether_the_template_or_the_model_opens_the_thought(
    end_id: int, turns: list[str], paper: float, math: float
):
    found: list[tuple[float, ...]] = []
    for opens in ("true", "false"):
        tokenizer = build_tokenizer()
        tokenizer.chat_template = TEMPLATE.replace("OPENS", opens)
        chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id])
        said = turns if opens == "true" else [f"<think>{turn}" for turn in turns]
        trajectory = await run(chat, end_id, *said)
        weights = {"exact_match": 1.0, "math_equal": 0.0, "reasoning_format": 0.0}
        strict = await Scorer(RewardConfig(rule="paper")).score_trajectory(trajectory)
        loose = await Scorer(RewardConfig(components=weights)).score_trajectory(trajectory)
        found.append((strict.total, loose.total, *(loose.components[name] for name in weights)))
    assert found[0] == found[1]
    assert found[0][0] == paper
    assert found[0][3] == math
