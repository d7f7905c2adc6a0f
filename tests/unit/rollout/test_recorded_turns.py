"""What a trajectory keeps of its turns: what each says, and what the model read after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1.rollout.envs.text_env import TextEnv
from agent_r1.text.chat_format import ChatFormat, reply_roles
from agent_r1_proto.messages import decode_entry, encode_entry
from agent_r1_proto.parts import ImagePart, StoredImage, TextPart, shown_text
from agent_r1_proto.rewards import score_turns
from agent_r1_proto.tasks import ChatMessage, Task
from agent_r1_proto.tools import ToolCall, ToolResult
from agent_r1_proto.trajectory import Trajectory
from tests.support.builders import rollout_task
from tests.support.fakes import (
    FORGETFUL_TEMPLATE,
    HERMES_TEMPLATE,
    FakeToolServer,
    build_tokenizer,
    call_text,
)
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
        with pytest.raises(ValueError, match="image_refused: an image"):
            built.loop.prompt_tokens(Task(id="t", prompt=prompt))
    assert (trajectory.status, trajectory.written_version()) == ("FAILED", "4.0")
    assert trajectory.reason.startswith("image_refused: ")


async def test_an_environment_that_describes_an_image_shows_text(chat: ChatFormat, end_id: int):
    answer = ToolResult(parts=[TextPart(text="see"), IMAGE])
    trajectory = await run(chat, end_id, answer=answer, observations=["a cat"])
    assert trajectory.status == "COMPLETED"
    assert shown(trajectory) == [("tool", "a cat", 0)]


class Own(ToolEnv):
    """As the documentation has it: shows the text of each result."""

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        if not results:
            return EnvStep(done=True, reason="answer")
        return EnvStep(observations=[result.text for result in results])


class Describing(ToolEnv):
    """Says how many parts a result has."""

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        if not results:
            return EnvStep(done=True, reason="answer")
        return EnvStep(observations=[f"{len(result.parts)} parts" for result in results])


@pytest.mark.parametrize("parts", [[IMAGE], [TextPart(text="see"), IMAGE]])
@pytest.mark.parametrize(
    ("env", "status"),
    [(TextEnv, "FAILED"), (Own, "FAILED"), (ToolEnv, "FAILED"), (Describing, "COMPLETED")],
)
async def test_no_environment_leaves_an_image_out_without_a_word(
    end_id: int, env: type[ToolEnv], status: str, parts: list[Any]
):
    roles = reply_roles(tools=True, messages=True)
    chat = ChatFormat(build_tokenizer(), end_of_turn_ids=[end_id], reply_roles=roles)
    async with (
        FakeToolServer(answer=lambda _: ToolResult(parts=parts)) as server,
        agent_loop(chat, end_id, [SEARCH, ANSWER], server, make_env=env) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == status
    if status == "FAILED":
        assert trajectory.reason.startswith("image_refused: ")
        assert "an image (image/png) cannot be shown" in trajectory.reason


class Redacting(ToolEnv):
    """Hides what a tool said."""

    sends_messages = True

    def __init__(self, task: Task, step: EnvStep) -> None:
        super().__init__(task)
        self.last = step

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        return self.last


HIDDEN = EnvStep(observations=["[redacted]"])


@pytest.mark.parametrize(
    ("step", "env", "seen"),
    [
        (HIDDEN, {"max_turns": 1}, [("tool", "[redacted]", 0)]),
        (replace(HIDDEN, done=True), {}, [("tool", "[redacted]", 0)]),
        (EnvStep(message="Well done.", done=True), {}, [("user", "Well done.", None)]),
        (
            EnvStep(observations=["x" * 9000], message="Hm."),
            {"max_tool_response_chars": 9000, "max_turns": 9},  # more than the context has room for
            [("tool", "x" * 9000, 0), ("user", "Hm.", None)],
        ),
        (EnvStep(observations=["SECRET"], done=True), {}, None),  # as the call has it
        (EnvStep(done=True), {}, None),
        (EnvStep(observations=["a", "b"], done=True), {}, [("tool", "a", 0), ("tool", "b", None)]),
    ],
)
async def test_what_the_environment_gave_at_the_end_is_what_rewards_read(
    end_id: int, step: EnvStep, env: dict[str, Any], seen: list[Any] | None
):
    roles = reply_roles(tools=True, messages=True)
    chat = ChatFormat(build_tokenizer(), end_of_turn_ids=[end_id], reply_roles=roles)
    answer = ToolResult(parts=[TextPart(text="SECRET")])
    async with (
        FakeToolServer(answer=lambda _: answer) as server,
        agent_loop(
            chat, end_id, [SEARCH], server, env=env, make_env=lambda task: Redacting(task, step)
        ) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status in ("COMPLETED", "TRUNCATED")
    assert shown(trajectory) == (seen or [("tool", "SECRET", 0)])
    assert (trajectory.turns[0].replies is None) == (seen is None)


async def test_an_image_that_nobody_would_see_refuses_nothing(chat: ChatFormat, end_id: int):
    answer = ToolResult(parts=[TextPart(text="see"), IMAGE])
    trajectory = await run(chat, end_id, answer=answer, env={"max_turns": 1})
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "max_turns")


STORED = StoredImage.of(IMAGE)


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([IMAGE], [STORED]),
        ([TextPart(text="see"), IMAGE], [TextPart(text="see"), STORED]),
        (
            [IMAGE, TextPart(text="a\n"), TextPart(text="b"), IMAGE, IMAGE, TextPart(text="c")],
            [STORED, TextPart(text="a\n\nb"), STORED, STORED, TextPart(text="c")],
        ),
        ([TextPart(text="x" * 5000), IMAGE], [TextPart(text="x" * 89 + "\n[truncated]")]),
    ],
)
async def test_an_image_that_no_model_was_to_see_is_kept_as_an_image(
    chat: ChatFormat, end_id: int, parts: list[Any], kept: list[Any]
):
    env = {"max_turns": 1, "max_tool_response_chars": 101}  # 101 - 12 for the marker
    trajectory = await run(chat, end_id, answer=ToolResult(parts=parts), env=env)
    replies = trajectory.turns[0].replies
    assert replies is not None
    assert replies[0].parts == kept
    assert decode_entry(Trajectory, encode_entry(trajectory)).turns == trajectory.turns


def nested(depth: int) -> Any:
    data: Any = 1
    for _ in range(depth):
        data = [data]
    return data


async def test_data_that_could_not_be_read_back_is_refused(chat: ChatFormat, end_id: int):
    trajectory = await run(chat, end_id, data=nested(100))
    assert trajectory.turns[0].data == nested(100)
    assert decode_entry(Trajectory, encode_entry(trajectory)).turns == trajectory.turns
    for depth in (101, 200):
        trajectory = await run(chat, end_id, data={"x": nested(depth - 1)})
        assert trajectory.status == "FAILED"
        assert f"{depth} lists and dicts within one another; at most 100" in trajectory.reason


@pytest.mark.parametrize(
    "make",
    [
        lambda: nested(5000),
        lambda: {"x": nested(5000)},
        lambda: 10**5000,
        lambda: [-(10**5000)],
    ],
)
async def test_data_that_cannot_even_be_written_is_refused_by_name(
    chat: ChatFormat, end_id: int, make: Callable[[], Any]
):
    trajectory = await run(chat, end_id, data=make())
    assert trajectory.status == "FAILED"
    assert "returned data = " in trajectory.reason
    assert "it must be JSON" in trajectory.reason
    assert "at most 100 within one another" in trajectory.reason


async def test_data_of_a_tool_that_could_not_be_read_back_is_not_recorded(
    chat: ChatFormat, end_id: int
):
    for depth, kept in ((100, True), (101, False)):
        answer = ToolResult(parts=[TextPart(text="x")], data=nested(depth))
        trajectory = await run(chat, end_id, answer=answer)
        assert trajectory.status == "COMPLETED"
        assert trajectory.turns[0].calls[0].data == (nested(depth) if kept else None)


@pytest.mark.parametrize(
    "data",
    [
        {1, 2},
        float("nan"),
        object(),
        {1: 2},
        {"x": (1,)},
        np.True_,
        {"x": [np.False_]},
        np.int64(1),
    ],
)
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


def sometimes(opens: str, template: str = HERMES_TEMPLATE) -> str:
    """Return a template that begins a thought for the model under a condition."""
    return template.replace(
        "'assistant\n' }}", f"'assistant\n' + ('<think>\n' if {opens} else '') }}}}"
    )


# As DeepSeek-R1 has it: the model goes on right behind a result, and earlier thoughts are dropped.
R1_TEMPLATE = sometimes("true", FORGETFUL_TEMPLATE).replace(
    "if add_generation_prompt", "if add_generation_prompt and messages[-1].role != 'tool'"
)
IN_THOUGHT, THOUGHT = "", "<think>"


@pytest.mark.parametrize("question", ["who?", "Think in <think>.", "Think in <think>"])
@pytest.mark.parametrize(
    ("template", "tools", "segments", "openings"),
    [
        (sometimes("tools"), True, False, [IN_THOUGHT, IN_THOUGHT]),
        (sometimes("tools"), False, False, [THOUGHT]),
        (sometimes("not tools"), True, False, [THOUGHT, THOUGHT]),
        (sometimes("not tools"), False, False, [IN_THOUGHT]),
        (sometimes("messages[-1].role == 'user'"), True, False, [IN_THOUGHT, THOUGHT]),
        (sometimes("messages[-1].role == 'user'"), True, True, [IN_THOUGHT, THOUGHT]),
        (sometimes("messages[-1].role == 'tool'"), True, False, [THOUGHT, IN_THOUGHT]),
        (sometimes("messages|length == 1", FORGETFUL_TEMPLATE), True, True, [IN_THOUGHT, THOUGHT]),
        (R1_TEMPLATE, True, True, [IN_THOUGHT, THOUGHT]),
        (HERMES_TEMPLATE, True, False, [THOUGHT, THOUGHT]),
    ],
)
async def test_a_right_answer_is_worth_the_same_wherever_the_template_opens_thoughts(
    end_id: int, template: str, tools: bool, segments: bool, openings: list[str], question: str
):
    chat = ChatFormat(
        build_tokenizer(template=template),
        end_of_turn_ids=[end_id],
        reply_roles=("tool",) if tools else (),
        segments=segments,
    )
    said = [f"look</think>{SEARCH}", "found</think><answer>Ada</answer>"][-len(openings) :]
    turns = [opening + text for opening, text in zip(openings, said, strict=True)]
    async with FakeToolServer() as server:
        servers = [server] * tools
        async with agent_loop(chat, end_id, turns, *servers) as built:
            trajectory = await built.loop.run(
                rollout_task(task=Task(id="t", prompt=question, payload={"answers": ["Ada"]}))
            )
    assert [turn.well_formed for turn in trajectory.turns] == [True] * len(turns)
    reward = await Scorer(RewardConfig(rule="paper")).score_trajectory(trajectory)
    assert reward.total == 1.0


async def test_an_answer_behind_a_result_is_no_thought_where_the_template_opens_none(end_id: int):
    chat = ChatFormat(
        build_tokenizer(template=R1_TEMPLATE), end_of_turn_ids=[end_id], segments=True
    )
    trajectory = await run(chat, end_id, f"look</think>{SEARCH}", "<answer>Ada</answer>")
    assert [turn.answer for turn in trajectory.turns] == [None, "Ada"]
    assert trajectory.turns[0].thought == "look"


async def test_a_rewritten_history_shows_the_thought_that_the_template_opened(end_id: int):
    keeping = sometimes("messages[-1].role == 'user'", FORGETFUL_TEMPLATE)
    tokenizer = build_tokenizer(template=keeping.replace("and not loop.last", "and loop.first"))
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id], segments=True)
    assert chat.said("a</think>b", "<think>\n").content == "<think>\na</think>b"
