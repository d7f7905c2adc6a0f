"""ATIF documents: every kind of trajectory passes the validator of the package `atif`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import atif
import numpy as np
import pytest

from agent_r1.cli import main as cli
from agent_r1.runs.atif import SCHEMA_VERSION, atif_document
from agent_r1.runs.store import StoredTrajectory, TrajectoryStore, stored_files
from agent_r1_proto.parts import StoredImage, TextPart
from agent_r1_proto.tasks import ChatMessage, MessageCall, Task
from agent_r1_proto.trajectory import Reply, ToolCallRecord, Turn
from tests.support.builders import rollout_task, scored, stored, three_lineages, two_segments

IMAGE = StoredImage(media_type="image/png", sha256="0" * 64)
OLD_RUNS = sorted((Path(__file__).parents[2] / "contract").glob("run_*/run"))


def call(end: int, tool: str = "search", status: Any = "ok", text: str = "found") -> ToolCallRecord:
    parts: list[Any] = [TextPart(text=text)]
    arguments: dict[str, Any] = {"query": text}
    return ToolCallRecord(
        end_token_index=end, tool=tool, arguments=arguments, status=status, parts=parts
    )


def turn(start: int, *calls: ToolCallRecord, **fields: Any) -> Turn:
    return Turn(
        start=start, end=start + 1, text="text", finish_reason="stop", calls=list(calls), **fields
    )


def with_turns(*turns: Turn, **fields: Any) -> StoredTrajectory:
    """A trajectory of 2 prompt tokens and a sampled one for each turn."""
    return stored(scored(turns=list(turns), num_sampled=len(turns), **fields))


def asked(*messages: ChatMessage) -> StoredTrajectory:
    return stored(scored(rollout_task(task=Task(id="q", prompt=list(messages)))))


READ = {"well_formed": True, "thought": "Hm.", "said": "Look."}
KINDS: dict[str, StoredTrajectory] = {
    "one turn": stored(),
    "several turns": with_turns(turn(2, call(2), **READ), turn(3, call(3)), turn(4, answer="Ada")),
    "parallel calls": with_turns(
        turn(2, call(2, text="a"), call(2, "read", "error", "b")), turn(3)
    ),
    "a call that was not read": with_turns(turn(2, call(2, "", "malformed", "no JSON")), turn(3)),
    "replies": with_turns(
        turn(
            2,
            call(2),
            replies=[
                Reply(role="tool", parts=[TextPart(text="cut"), IMAGE], call=0),
                Reply(role="user", parts=[TextPart(text="Go on.")]),
            ],
        ),
        turn(3, replies=[Reply(role="user", parts=[TextPart(text="Never read.")])]),
    ),
    "failed": with_turns(
        turn(2, call(2, status="failed")), status="FAILED", reason="tool_timeout: search"
    ),
    "failed before a turn": with_turns(status="FAILED", reason="no engine", version_spans=[]),
    "cut off": stored(scored(status="TRUNCATED", reason="max_turns")),
    "segments": stored(scored(**two_segments())),
    "lineages": stored(scored(**three_lineages())),
    "of an evaluation": stored(step=0, advantage=None, trained=False),
    "a dialogue": asked(
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content=[TextPart(text="Who is it?"), IMAGE]),
        ChatMessage(
            role="assistant",
            content="",
            tool_calls=[MessageCall(name="search", id="x"), MessageCall(name="read")],
        ),
        ChatMessage(role="tool", content="one", tool_call_id="x"),
        ChatMessage(role="tool", content="two"),
    ),
    "without tokens": StoredTrajectory(stored().record, None),
}


def document(one: StoredTrajectory) -> dict[str, Any]:
    made = atif_document(one, version="0.1.0", model="base")
    return json.loads(json.dumps(made, allow_nan=False))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_trajectory_is_valid(kind: str):
    checked = atif.Trajectory.model_validate(document(KINDS[kind]))
    assert checked.schema_version == SCHEMA_VERSION
    assert len(checked.steps) >= 1


@pytest.mark.parametrize("run", OLD_RUNS, ids=lambda run: run.parent.name)
def test_trajectories_of_older_versions_are_valid(run: Path):
    (file,) = stored_files(run)
    for one in file.trajectories():
        checked = atif.Trajectory.model_validate(document(one))
        assert checked.steps[-1].source == "agent"


def test_calls_results_thoughts_and_tokens_are_where_the_format_has_them():
    first, second, third, last = document(KINDS["several turns"])["steps"]
    assert (first["source"], first["message"]) == ("user", "who?")
    assert (second["message"], second["reasoning_content"]) == ("Look.", "Hm.")
    (made,) = second["tool_calls"]
    assert (made["function_name"], made["arguments"]) == ("search", {"query": "found"})
    result = {"content": "found", "source_call_id": made["tool_call_id"]}
    assert second["observation"] == {"results": [result]}
    assert third["tool_calls"][0]["tool_call_id"] != made["tool_call_id"]
    assert last["metrics"] == {
        "completion_tokens": 1,
        "completion_token_ids": [4],
        "logprobs": [-0.5],
    }


def test_what_a_user_says_between_turns_is_a_step_and_what_nobody_read_is_none():
    steps = document(KINDS["replies"])["steps"]
    assert [step["source"] for step in steps] == ["user", "agent", "user", "agent"]
    assert steps[2]["message"] == "Go on."
    assert steps[1]["observation"]["results"][0]["content"] == "cut\n[image/png 000000000000]"


def test_a_dialogue_is_copied_context_with_its_images_and_results():
    system, user, assistant, turn_of_model = document(KINDS["a dialogue"])["steps"]
    assert (system["source"], turn_of_model.get("is_copied_context")) == ("system", None)
    assert user["message"][1]["source"] == {"media_type": "image/png", "path": f"sha256:{'0' * 64}"}
    assert assistant["is_copied_context"] is True
    ids = [one["tool_call_id"] for one in assistant["tool_calls"]]
    results = assistant["observation"]["results"]
    assert [one["source_call_id"] for one in results] == ids
    assert [one["content"] for one in results] == ["one", "two"]


def test_the_system_prompt_of_the_run_is_the_first_step():
    first, second, *_ = document(stored(system_prompt="Use the tools."))["steps"]
    assert (first["source"], first["message"]) == ("system", "Use the tools.")
    assert second["source"] == "user"


def test_answers_are_left_out():
    task = Task(id="q", prompt="who?", payload={"answers": ["Ada-the-answer"]})
    made = json.dumps(document(stored(scored(rollout_task(task=task)))))
    assert "who?" in made
    assert "Ada-the-answer" not in made
    assert "payload" not in made


def test_what_is_no_number_in_json_is_left_out():
    one = stored()
    assert one.tokens is not None
    odd = np.where(one.tokens.action_mask, -np.inf, 0.0).astype(np.float32)
    odd[-1] = np.nan
    spoilt = StoredTrajectory(one.record, replace(one.tokens, rollout_logprobs=odd))
    metrics = document(spoilt)["steps"][-1]["metrics"]
    assert metrics == {"completion_tokens": 3, "completion_token_ids": [2, 3, 4]}


def test_other_agents_are_subagents_and_rewards_are_kept():
    made = document(KINDS["lineages"])
    names = [one["agent"]["name"] for one in made["subagent_trajectories"]]
    assert (made["agent"]["name"], names) == ("main", ["search", "judge"])
    assert made["subagent_trajectories"][1]["extra"]["excluded"] == "another model"
    assert made["extra"]["reward"]["components"] == {"em": 1.0}
    assert [one["message"] for one in made["subagent_trajectories"][0]["steps"]] == [
        "look",
        "found",
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    store = TrajectoryStore(folder, 1.0)
    store.write("step_000001", [stored(), stored()])
    store.write("step_000002", [stored(step=2)])
    store.write("eval_before", [stored(step=0, trained=False)])
    return folder


def test_the_command_writes_a_valid_file_for_each(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert cli.main(["export", str(run), str(out), "--trajectories", "atif"]) == 0
    assert "4 trajectories" in capsys.readouterr().out
    written = sorted(out.rglob("*.json"))
    assert [str(path.relative_to(out)) for path in written] == [
        *("eval_before/00000.json", "step_000001/00000.json", "step_000001/00001.json"),
        "step_000002/00000.json",
    ]
    for path in written:
        atif.Trajectory.model_validate_json(path.read_bytes())
    assert cli.main(["export", str(run), str(out), "--trajectories", "atif"]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_the_command_writes_json_alone(run: Path, tmp_path: Path):
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    old = stored().record | {"process_reward": float("nan"), "advantage": float("inf")}
    (run / "trajectories" / "step_000003.jsonl").write_text(json.dumps(old))
    arguments = [str(run), str(tmp_path / "out"), "--trajectories", "atif", "--step", "3"]
    assert cli.main(["export", *arguments]) == 0
    text = (tmp_path / "out" / "step_000003" / "00000.json").read_text()
    assert json.loads(text, parse_constant=refuse)["extra"]["advantage"] is None


def test_the_command_writes_one_table(run: Path, tmp_path: Path):
    import pandas as pd

    out = tmp_path / "out"
    arguments = ["export", str(run), str(out), "--trajectories", "parquet"]
    assert cli.main(arguments) == 0
    frame = pd.read_parquet(out / "trajectories.parquet")
    assert [*frame["step"]] == [1, 1, 2, 0]
    assert frame["evaluation"].fillna("").tolist() == ["", "", "", "before"]
    assert frame["token_ids"][0].tolist() == [0, 1, 2, 3, 4]
    one = tmp_path / "one"
    assert cli.main([*arguments[:2], str(one), *arguments[3:], "--step", "2"]) == 0
    assert [*pd.read_parquet(one / "trajectories.parquet")["step"]] == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "9"], "no stored trajectory of step 9"),
        (["--step", "best"], r"--step \(best\) must be a number"),
        (["--critic"], "--trajectories"),
    ],
)
def test_what_cannot_be_exported_is_named(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
):
    arguments = ["export", str(run), str(tmp_path / "out"), "--trajectories", "atif", *options]
    assert cli.main(arguments) == 2
    assert message.replace("\\", "") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
