"""Lineages, policies and versions of the messages."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1_proto.connection import Keys
from agent_r1_proto.messages import EntryError, decode_entry, encode_entry
from agent_r1_proto.parts import ImageRefusedError, StoredImage, TextPart, text_of
from agent_r1_proto.rewards import ScoreTurn
from agent_r1_proto.tasks import ChatMessage, RolloutTask, Task
from agent_r1_proto.trajectory import Lineage, Reply, ToolCallRecord
from agent_r1_proto.weights import LoadRequest, WeightManifest
from tests.support.builders import rollout_task, scored, three_lineages, trajectory, two_segments

IMAGE = StoredImage(media_type="image/png", sha256="0a" * 32)


def lineages(*given: dict[str, Any]) -> dict[str, Any]:
    return three_lineages() | {"lineages": [Lineage(name="x", **one) for one in given]}


def test_a_lineage_is_a_run_of_segments():
    record = trajectory(**three_lineages())
    assert record.segment_bounds() == [(0, 4), (4, 9), (9, 11)]
    assert record.lineage_bounds() == [(0, 4), (4, 9), (9, 11)]
    two = trajectory(**lineages({"first_segment": 0}, {"first_segment": 1}))
    assert two.lineage_bounds() == [(0, 4), (4, 11)]
    assert trajectory().lineage_bounds() == [(0, 5)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"first_segment": 1}], r"begin with the segments \[1\]; they must rise from 0"),
        ([{"first_segment": 0}, {"first_segment": 0}], "must rise"),
        ([{"first_segment": 0}, {"first_segment": 3}], "below the 3 segments"),
        ([{"first_segment": 0, "parent": 0}], "it must be one before it"),
        ([{"first_segment": 0, "policy": "other"}], "'other'.* is not known"),
    ],
)
def test_lineages_that_make_no_sense_are_refused(given: list[dict[str, Any]], message: str):
    with pytest.raises(ValueError, match=message):
        trajectory(**lineages(*given))


def test_a_message_is_written_as_the_oldest_version_that_says_all_of_it():
    plain, read = (
        trajectory(),
        [turn.model_copy(update={"well_formed": True}) for turn in trajectory().turns],
    )
    assert plain.written_version() == "2.1"
    assert plain.replace(turns=read).written_version() == "2.2"
    segments = trajectory(**two_segments())
    assert segments.written_version() == "3.0"
    told = [turn.model_copy(update={"data": 1}) for turn in segments.turns]
    assert segments.replace(turns=told).written_version() == "3.1"
    assert trajectory(**three_lineages()).written_version() == "4.0"
    assert scored(turns=read).written_version() == "2.4"
    assert scored(turns=read, tokens={"judge": 1}).written_version() == "2.4"
    assert scored(**three_lineages()).written_version() == "4.0"
    assert rollout_task().written_version() == "1.2"
    image = Task(id="t", prompt=[ChatMessage(role="user", content=[IMAGE])])
    assert rollout_task(task=image).written_version() == "2.0"
    assert trajectory(rollout_task(task=image)).written_version() == "4.0"
    call = ToolCallRecord(end_token_index=4, tool="x", status="ok", parts=[IMAGE])
    assert trajectory(calls=[call]).written_version() == "4.0"  # which older readers cannot read


def test_what_is_not_said_is_not_written():
    meta = encode_entry(trajectory())[b"meta"]
    assert not any(
        word in meta
        for word in (b"lineages", b'policy"', b"well_formed", b"replies", b"said", b'thought"')
    )
    assert "replies" not in ScoreTurn(text="x").model_dump_json()
    request = LoadRequest(manifest_location="x", policy_version=1)
    assert 'policy"' not in request.model_dump_json()


@pytest.mark.parametrize("kind", [LoadRequest, WeightManifest, RolloutTask])
def test_another_policy_is_refused_by_name(kind: Any):
    with pytest.raises(ValueError, match=r"'other'.* is not known.*leave the name out"):
        kind.model_validate({"policy": "other"})


def test_an_entry_for_another_policy_is_no_entry_of_this_release():
    fields = encode_entry(rollout_task())
    fields[b"meta"] = fields[b"meta"][:-1] + b',"policy":"other"}'
    with pytest.raises(EntryError, match="other"):
        decode_entry(RolloutTask, fields)


def test_the_default_policy_keeps_its_key():
    assert Keys("r").newest_version_of("policy") == Keys("r").newest_version
    assert Keys("r").newest_version == "agent_r1:r:weights:newest"
    assert Keys("r").newest_version_of("critic") == "agent_r1:r:weights:newest:critic"


def test_an_image_is_refused_where_text_is_read():
    assert text_of([TextPart(text="a"), TextPart(text="b")]) == "a\nb"
    with pytest.raises(ImageRefusedError, match="which reads text alone; send text"):
        text_of([TextPart(text="a"), IMAGE])


def test_replies_stand_for_results_only_where_they_differ():
    turn = trajectory().turns[0]
    assert turn.shown() == []
    said = Reply(role="user", parts=[TextPart(text="go on")])
    assert turn.model_copy(update={"replies": [said]}).shown() == [said]
