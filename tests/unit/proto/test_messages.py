"""The contract: what encodes, what decodes, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_r1_proto.messages import EntryError, NewerSchemaError, decode_entry, encode_entry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.tasks import RolloutTask, SamplingParameters, Task
from agent_r1_proto.trajectory import ToolCallRecord, Trajectory, Turn, VersionSpan
from tests.support.builders import repeated_segments, rollout_task, scored, trajectory, two_segments


@given(num_sampled=st.integers(0, 40), prompt_length=st.integers(0, 20))
def test_scored_trajectory_round_trips(num_sampled: int, prompt_length: int):
    message = scored(num_sampled=num_sampled, prompt_length=prompt_length)
    decoded = decode_entry(ScoredTrajectory, encode_entry(message))
    assert encode_entry(decoded) == encode_entry(message)
    assert decoded.trajectory.token_ids.tolist() == message.trajectory.token_ids.tolist()
    assert decoded.trajectory.num_action_tokens == num_sampled


def test_no_array_travels_as_json():
    meta = json.loads(encode_entry(scored())[b"meta"])
    assert not {"token_ids", "action_mask", "rollout_logprobs"} & set(meta["trajectory"])


def test_decoded_arrays_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        trajectory().token_ids[0] = 7


def test_a_field_of_a_newer_minor_is_ignored_even_inside_a_task():
    fields = encode_entry(rollout_task())
    meta = json.loads(fields[b"meta"])
    meta["invented_later"] = 1
    meta["task"]["invented_later"] = 2
    fields |= {b"schema": b"rollout_task/1.7", b"meta": json.dumps(meta).encode()}
    assert decode_entry(RolloutTask, fields) == rollout_task()


def test_a_newer_major_asks_for_an_upgrade():
    fields = encode_entry(rollout_task()) | {b"schema": b"rollout_task/3.0"}
    with pytest.raises(NewerSchemaError, match="upgrade this service"):
        decode_entry(RolloutTask, fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"schema": b"rollout_task/0.9"}, "older than"),
        ({b"schema": b"trajectory/1.0"}, "expected 'rollout_task'"),
        ({b"schema": b"nonsense"}, "expected name/major.minor"),
        ({b"meta": b"{"}, "does not parse"),
        ({b"meta": b"{}"}, "does not parse"),
    ],
)
def test_garbage_is_an_entry_error(change: dict[bytes, bytes], message: str):
    with pytest.raises(EntryError, match=message):
        decode_entry(RolloutTask, encode_entry(rollout_task()) | change)


def test_a_short_array_is_an_entry_error():
    fields = encode_entry(trajectory())
    fields[b"array:token_ids"] = fields[b"array:token_ids"][:-1]
    with pytest.raises(EntryError, match="4 bytes; 5 values need 5"):
        decode_entry(Trajectory, fields)


def test_only_sampled_tokens_send_a_logprob():
    fields = encode_entry(trajectory(prompt_length=1000, num_sampled=3))
    # 3 float32 values, and 1003 ids below 1003 in 2 bytes each
    assert len(fields[b"array:rollout_logprobs"]) == 12
    assert len(fields[b"array:token_ids"]) == 2006


def test_what_segments_begin_with_alike_is_sent_once():
    message = trajectory(**repeated_segments())
    fields = encode_entry(message)
    # by hand: 103 tokens of the first segment, 21 of each other one, in 2 bytes each
    assert len(fields[b"array:token_ids"]) == 2 * (103 + 21 + 21)
    assert json.loads(fields[b"repeats"]) == {"token_ids": [[0, 0], [100, 0], [120, 1]]}
    decoded = decode_entry(Trajectory, fields)
    np.testing.assert_array_equal(decoded.token_ids, message.token_ids)
    assert message.written_version() == "5.0"
    assert b"repeats" not in encode_entry(trajectory(**two_segments()))


@pytest.mark.parametrize(
    "repeats",
    [
        [[0, 0], [100, 1], [120, 1]],  # of itself
        [[0, 0], [104, 0], [116, 1]],  # more than there is
        [[0, 0], [-1, 0], [221, 1]],
        [[0, 0], [100, 0]],
        [[0, 0], [100, 0], "x"],
    ],
)
def test_a_beginning_that_no_segment_has_is_an_entry_error(repeats: object):
    fields = encode_entry(trajectory(**repeated_segments()))
    fields[b"repeats"] = json.dumps({"token_ids": repeats}).encode()
    with pytest.raises(EntryError, match="does not parse"):
        decode_entry(Trajectory, fields)


def test_logprobs_that_fit_neither_mask_nor_tokens_are_an_entry_error():
    fields = encode_entry(trajectory(prompt_length=4, num_sampled=3))
    lengths = json.loads(fields[b"lengths"]) | {"rollout_logprobs": 2}
    cut = {b"lengths": json.dumps(lengths).encode(), b"array:rollout_logprobs": bytes(8)}
    with pytest.raises(EntryError, match="does not parse"):
        decode_entry(Trajectory, fields | cut)


@pytest.mark.parametrize("width", [0, 5, "2"])
def test_a_width_that_no_value_has_is_an_entry_error(width: object):
    fields = encode_entry(trajectory())
    widths = json.loads(fields[b"widths"]) | {"token_ids": width}
    with pytest.raises(EntryError, match="does not parse"):
        decode_entry(Trajectory, fields | {b"widths": json.dumps(widths).encode()})


def test_a_user_typo_in_a_task_is_an_error():
    with pytest.raises(ValidationError, match="pormpt"):
        Task.model_validate({"id": "a", "prompt": "x", "pormpt": "y"})


def test_a_dialogue_must_end_with_the_user():
    with pytest.raises(ValidationError, match="last message must be the user's"):
        Task.model_validate({"id": "a", "prompt": [{"role": "assistant", "content": "hi"}]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_mask": np.array([True])}, "action_mask has 1 entries; token_ids has 5"),
        ({"rollout_logprobs": np.full(5, -0.5)}, "must be 0.0 where action_mask is False"),
        ({"version_spans": []}, "outside every version span"),
        (
            {
                "version_spans": [
                    VersionSpan(policy_version=0, start=3, end=5),
                    VersionSpan(policy_version=1, start=2, end=3),
                ]
            },
            "out of order",
        ),
        ({"prompt_length": 3}, "prompt_length"),
        ({"rollout_logprobs": np.array([0, 0, -1, np.nan, -1])}, "not finite"),
    ],
)
def test_an_inconsistent_trajectory_is_refused(change: dict[str, object], message: str):
    with pytest.raises(ValidationError, match=message):
        trajectory().replace(**change)


def test_segments_are_written_as_a_version_of_their_own_and_read_back():
    for message in (trajectory(**two_segments()), scored(**two_segments())):
        fields = encode_entry(message)
        assert fields[b"schema"].endswith(b"/3.0")
        again = decode_entry(type(message), fields)
        read = again.trajectory if isinstance(again, ScoredTrajectory) else again
        assert read.segment_bounds() == [(0, 5), (5, 10)]
        assert read.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25, -1, 0, 0, 0, -2, -0.125]


def test_one_segment_is_written_for_readers_that_know_no_others():
    for message in (trajectory(), scored()):
        fields = encode_entry(message)
        assert fields[b"schema"].endswith(b"/2.1")
        assert b"segment_starts" not in fields[b"meta"]
    assert trajectory().segment_bounds() == [(0, 5)]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0], "must rise, above 0"),
        ([7, 5], "must rise"),
        ([10], "below the 10 tokens"),
        ([1], "must begin after the prompt of 2 tokens"),
        ([8], "with a token that was not sampled"),
    ],
)
def test_segments_out_of_place_are_refused(starts: list[int], message: str):
    fields = two_segments()
    fields["segment_starts"] = starts
    with pytest.raises(ValidationError, match=message):
        trajectory(**fields)


def test_a_turn_lies_in_one_segment():
    fields = two_segments()
    fields["turns"] = [Turn(start=2, end=10, text="x", finish_reason="stop")]
    with pytest.raises(ValidationError, match=r"the segment at 5 begins within \[2, 10\)"):
        trajectory(**fields)


def test_a_call_must_end_at_a_sampled_token():
    call = ToolCallRecord(end_token_index=1, tool="search", status="ok")
    with pytest.raises(ValidationError, match="not a sampled token"):
        trajectory(calls=[call])


def test_policy_versions_are_those_of_action_tokens_only():
    spans = [
        VersionSpan(policy_version=3, start=0, end=2),
        VersionSpan(policy_version=5, start=2, end=4),
        VersionSpan(policy_version=6, start=4, end=5),
    ]
    assert trajectory(version_spans=spans).policy_versions() == [5, 6]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 2.0])
def test_a_temperature_is_one_that_vllm_samples_at(temperature: float):
    assert SamplingParameters(temperature=temperature).temperature == temperature


@pytest.mark.parametrize("temperature", [0.005, 2.1])
def test_a_temperature_that_vllm_would_change_or_refuse_is_an_error(temperature: float):
    with pytest.raises(ValidationError, match=r"at least 0\.01|less than or equal to 2"):
        SamplingParameters(temperature=temperature)
