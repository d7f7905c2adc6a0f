"""Records: a trajectory as people read it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from agent_r1.runs.record import mask_spans, prompt_messages, readable
from agent_r1_proto.parts import ImagePart, StoredImage, TextPart
from agent_r1_proto.tasks import ChatMessage, Task
from agent_r1_proto.trajectory import ToolCallRecord, Turn
from tests.support.builders import rollout_task, scored


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ([], []),
        ([0, 0], []),
        ([1, 1], [[0, 2]]),
        ([0, 1, 1, 0, 0, 1], [[1, 3], [5, 6]]),
        ([1, 0, 1], [[0, 1], [2, 3]]),
    ],
)
def test_mask_spans_are_half_open_ranges(mask: list[int], spans: list[list[int]]):
    assert mask_spans(np.array(mask, dtype=bool)) == spans


def test_a_readable_trajectory_keeps_sampled_text_and_tool_text_apart():
    image = ImagePart(media_type="image/png", data_base64="")
    call = ToolCallRecord(
        end_token_index=4,
        tool="search",
        arguments={"query": "Ada"},
        status="ok",
        version="7",
        parts=[TextPart(text="born 1815"), StoredImage.of(image)],
        process_reward=0.25,
    )
    turn = Turn(
        start=2,
        end=5,
        text="<think>I know.</think><answer>Ada</answer>",
        finish_reason="stop",
        calls=[call],
        process_reward=0.5,
        state_key="found",
    )
    record = readable(scored(turns=[turn]), step=3, advantage=-0.5, trained=True)
    json.dumps(record, allow_nan=False)
    shown = record["turns"][0]
    assert shown["text"] == turn.text
    assert (shown["process_reward"], shown["state_key"]) == (0.5, "found")
    assert shown["calls"][0]["text"] == "born 1815\n[image/png e3b0c44298fc]"  # of no bytes
    assert record["system_prompt"] is None
    assert record["prompt"] == [{"role": "user", "content": "who?"}]
    assert record["mask_spans"] == [[2, 5]]
    assert record["version_spans"] == [[0, 2, 5]]
    assert (record["process_reward"], record["advantage"], record["step"]) == (0.75, -0.5, 3)


def test_the_system_prompt_of_the_run_stands_before_what_the_task_says():
    own = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="who?"),
    ]
    for task, seen in (
        (Task(id="q", prompt="who?"), ["Use the tools.", "who?"]),
        (Task(id="q", prompt=own), ["Be brief.", "who?"]),
    ):
        one = scored(rollout_task(task=task))
        facts: dict[str, Any] = {"step": 1, "advantage": None, "trained": False}
        record = readable(one, **facts, system_prompt="Use the tools.")
        assert [message.content for message in prompt_messages(record)] == seen
        # Rewards, and what is scored again, get what the task says.
        assert record["prompt"] == [message.model_dump() for message in task.messages()]
        del record["system_prompt"]  # as before it was stored
        assert [message.content for message in prompt_messages(record)][-1] == "who?"
