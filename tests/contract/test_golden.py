"""Encoded bytes of every released schema version still decode to what they meant.

A file in golden/ is written once, by `python -m tests.contract.test_golden`, when a version is
released, and never changed afterwards.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1_proto.messages import StreamMessage, decode_entry, encode_entry
from agent_r1_proto.parts import StoredImage, TextPart
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.tasks import ChatMessage, Decoding, MessageCall, RolloutTask, Task
from agent_r1_proto.trajectory import DecodingCost, Reply, ToolCallRecord, Trajectory, Turn
from tests.support.builders import (
    repeated_segments,
    rollout_task,
    scored,
    three_lineages,
    trajectory,
    two_segments,
)

GOLDEN = Path(__file__).parent / "golden"
CALL = ToolCallRecord(
    end_token_index=4,
    tool="search",
    arguments={"query": "Ada"},
    status="ok",
    version="1",
    instance="search-1",
    latency_ms=2.5,
    parts=[TextPart(text="Ada\nborn 1815")],
    process_reward=0.5,
)
CALL_WITH_DATA = CALL.model_copy(update={"data": [{"id": "p1", "score": 7.5}]})
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TURN = Turn(
    start=2, end=5, text="x", finish_reason="stop", process_reward=0.5, state_key="Ada is known"
)
IMAGE = StoredImage(media_type="image/png", sha256="0a" * 32)
SHOWN = ChatMessage(role="user", content=[TextPart(text="what is it?"), IMAGE])
CALLING = Task(
    id="q",
    prompt=[
        ChatMessage(role="user", content="Who wrote Emma?"),
        ChatMessage(
            role="assistant",
            content="",
            tool_calls=[MessageCall(name="search", arguments={"query": "Emma"}, id="call_1")],
        ),
        ChatMessage(role="tool", content="Jane Austen", tool_call_id="call_1"),
    ],
)
READ_TURN = Turn(
    start=2,
    end=5,
    text="<think>hm</think>look",
    finish_reason="stop",
    calls=[CALL],
    well_formed=False,
    thought="hm",
    said="look",
    answer="Ada",
    replies=[
        Reply(role="tool", parts=[TextPart(text="A[truncated]")], call=0),
        Reply(role="user", parts=[TextPart(text="go on")]),
    ],
    data={"seen": 1},
)
SEEN_TURN = READ_TURN.model_copy(
    update={
        "start": 2,
        "end": 4,
        "calls": [CALL.model_copy(update={"end_token_index": 3, "parts": [IMAGE]})],
    }
)
SEEN_LINEAGES: dict[str, Any] = three_lineages() | {"turns": [SEEN_TURN]}
READ_SEGMENTS: dict[str, Any] = two_segments() | {"turns": [READ_TURN]}
BEAM = Decoding(method="beam", candidates=4, keep=2, max_calls="budget", scorer="reward_model")
COST = DecodingCost(sampled_tokens=90, calls=7, replayed_calls=1, scores=8, scorer_tokens=400)
EXAMPLES: dict[str, StreamMessage] = {
    "rollout_task-1.0": rollout_task(group_id=7, sample_index=1, attempt=2),
    "rollout_task-1.1": rollout_task(group_id=7, traceparent=TRACEPARENT),
    "rollout_task-1.2": rollout_task(purpose="eval", decoding=BEAM),
    "rollout_task-2.0": rollout_task(task=Task(id="q", prompt=[SHOWN])),
    "rollout_task-2.1": rollout_task(task=CALLING),
    "trajectory-1.0": trajectory(policy_version=4, calls=[CALL]),
    "trajectory-1.1": trajectory(policy_version=4, calls=[CALL_WITH_DATA]),
    "trajectory-1.2": trajectory(rollout_task(traceparent=TRACEPARENT), policy_version=4),
    "trajectory-1.3": trajectory(policy_version=4, turns=[TURN]),
    "trajectory-2.0": trajectory(policy_version=4, token_ids=np.array([7, 300, 151_935, 0, 9])),
    "trajectory-2.1": trajectory(policy_version=4, decoding=COST),
    "trajectory-2.2": trajectory(policy_version=4, turns=[READ_TURN]),
    "trajectory-3.0": trajectory(**two_segments()),
    "trajectory-3.1": trajectory(**READ_SEGMENTS),
    "trajectory-4.0": trajectory(**SEEN_LINEAGES),
    "trajectory-4.1": trajectory(rollout_task(task=CALLING)),
    "trajectory-5.0": trajectory(**repeated_segments()),
    "scored_trajectory-1.0": scored(policy_version=4, calls=[CALL], total=0.25),
    "scored_trajectory-1.1": scored(policy_version=4, calls=[CALL_WITH_DATA], total=0.25),
    "scored_trajectory-1.2": scored(rollout_task(traceparent=TRACEPARENT), total=0.25),
    "scored_trajectory-1.3": scored(policy_version=4, turns=[TURN], total=0.25),
    "scored_trajectory-2.0": scored(policy_version=4, calls=[CALL], token_ids=np.arange(5) + 300),
    "scored_trajectory-2.1": scored(policy_version=4, decoding=COST, total=0.25),
    "scored_trajectory-2.2": scored(policy_version=4, total=0.25, tokens={"critic": 5}),
    "scored_trajectory-2.3": scored(policy_version=4, total=0.25, versions={"judge": "m-2"}),
    "scored_trajectory-2.4": scored(turns=[READ_TURN], versions={"judge": "m-2"}),
    "scored_trajectory-2.5": scored(policy_version=4, total=0.25, reasons={"judge": "3 of 4"}),
    "scored_trajectory-3.0": scored(**two_segments(), total=0.25),
    "scored_trajectory-3.1": scored(**two_segments(), total=0.25, tokens={"critic": 5}),
    "scored_trajectory-3.2": scored(**two_segments(), total=0.25, versions={"judge": "m-2"}),
    "scored_trajectory-3.3": scored(**READ_SEGMENTS),
    "scored_trajectory-3.4": scored(**READ_SEGMENTS, reasons={"judge": "3 of 4"}),
    "scored_trajectory-4.0": scored(**three_lineages(), total=0.25),
    "scored_trajectory-4.1": scored(rollout_task(task=CALLING), total=0.25),
    "scored_trajectory-4.2": scored(rollout_task(task=CALLING), reasons={"judge": "3 of 4"}),
    "scored_trajectory-5.0": scored(**repeated_segments(), total=0.25),
    "scored_trajectory-5.1": scored(**repeated_segments(), reasons={"judge": "3 of 4"}),
}
"""By schema and the version that first could write them."""
WRITTEN = (
    *("rollout_task-1.2", "rollout_task-2.0", "rollout_task-2.1"),
    *("trajectory-2.1", "trajectory-2.2", "trajectory-3.0", "trajectory-3.1", "trajectory-4.0"),
    *("trajectory-4.1", "trajectory-5.0"),
    *(f"scored_trajectory-2.{minor}" for minor in (1, 2, 3, 4, 5)),
    *(f"scored_trajectory-3.{minor}" for minor in (0, 1, 2, 3, 4)),
    *(f"scored_trajectory-4.{minor}" for minor in (0, 1, 2)),
    *("scored_trajectory-5.0", "scored_trajectory-5.1"),
)
"""What this version writes: the oldest version that says all of it, which older readers take."""
CLASSES: dict[str, type[StreamMessage]] = {
    "rollout_task": RolloutTask,
    "trajectory": Trajectory,
    "scored_trajectory": ScoredTrajectory,
}
CURRENT = {f"{cls.SCHEMA_NAME}-{cls.SCHEMA_VERSION}" for cls in CLASSES.values()}


def _read(path: Path) -> dict[bytes, bytes]:
    return {
        name.encode(): base64.b64decode(value)
        for name, value in json.loads(path.read_text()).items()
    }


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_golden_bytes_decode_to_the_message_they_were_made_of(name: str):
    message = EXAMPLES[name]
    decoded = decode_entry(CLASSES[name.rsplit("-", 1)[0]], _read(GOLDEN / f"{name}.json"))
    assert encode_entry(decoded) == encode_entry(message)


@pytest.mark.parametrize("name", WRITTEN)
def test_this_version_still_writes_the_golden_bytes(name: str):
    assert encode_entry(EXAMPLES[name]) == _read(GOLDEN / f"{name}.json")


def test_every_released_version_has_golden_bytes():
    assert {path.stem for path in GOLDEN.glob("*.json")} >= {*CURRENT, *WRITTEN}


if __name__ == "__main__":
    for example_name, example in EXAMPLES.items():
        target = GOLDEN / f"{example_name}.json"
        if not target.exists():
            encoded = {
                name.decode(): base64.b64encode(value).decode()
                for name, value in encode_entry(example).items()
            }
            target.write_text(json.dumps(encoded, indent=1) + "\n")
