"""`agent-r1 rescore`: stored trajectories under other rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.cli import main as cli
from agent_r1.cli.results.rescore import request_of
from agent_r1.reward import scorer
from agent_r1.runs.record import readable
from agent_r1.runs.store import StoredTrajectory, TrajectoryStore, stored_files
from agent_r1_proto.rewards import Reward
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import (
    SEPARATORS,
    rollout_task,
    scored,
    stored,
    three_lineages,
    trajectory,
)
from tests.support.config_scene import write_scene

TASK = Task(id="q", prompt="who?", payload={"answers": ["Ada"]})
CALL = ToolCallRecord(
    end_token_index=4, tool="search", arguments={"query": "a"}, status="ok", data=["hit"]
)
BRIEF = "def brevity(request):\n    return 1.0 - len(request.turns[-1].text) / 100\n"
BROKEN = "def broken(request):\n    raise KeyError('goal')\n"


def write_run(folder: Path, rewards: dict[int, list[tuple[str, float]]]) -> Path:
    """A run folder with one step: answer and stored reward of each sample, by group."""
    (folder / "run" / "trajectories").mkdir(parents=True)
    samples = list[StoredTrajectory]()
    for group, members in rewards.items():
        for index, (answer, total) in enumerate(members):
            rollout = rollout_task(group_id=group, sample_index=index, task=TASK)
            reward = Reward(total=total, components={"exact_match": total})
            samples.append(
                stored(scored(rollout, answer=answer, calls=[CALL]).replace(reward=reward))
            )
    TrajectoryStore(folder / "run", 1.0).write("step_000001", samples)
    return folder / "run"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_scene(tmp_path / "scene")


def test_other_rewards_are_compared_with_the_stored_ones(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
):
    # "Ada B" is half right: precision 1/2, recall 1, so F1 = 2/3.
    run = write_run(tmp_path, {0: [("Ada B", 0.0), ("Bob", 0.0)], 1: [("Ada", 1.0), ("Bob", 0.0)]})
    out = tmp_path / "rewards.jsonl"
    options = ["--config", str(config), "--set", "reward.components={f1=1.0}", "--out", str(out)]
    assert cli.main(["rescore", str(run), *options]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["4", "trajectories", "of", "1", "steps"]
    # (2/3 + 0 + 1 + 0) / 4; of two groups one had equal rewards before, none has now.
    assert ["reward", "0.250", "0.417"] in lines
    assert ["f1", "-", "0.417"] in lines
    assert ["groups", "of", "equal", "rewards", "0.500", "0.000"] in lines
    first = json.loads(out.read_text().splitlines()[0])
    assert (first["before"]["total"], first["after"]["total"]) == (0.0, pytest.approx(2 / 3))


def test_another_pattern_of_answers_reads_the_stored_turns_anew(tmp_path: Path, config: Path):
    run, out = write_run(tmp_path, {0: [("Ada", 1.0)]}), tmp_path / "rewards.jsonl"
    # Two letters of the answer; the thought, "I know.", is not searched.
    options = ["--config", str(config), "--set", "env.answer_pattern='([A-Zk]\\w)'"]
    assert cli.main(["rescore", str(run), *options, "--out", str(out)]) == 0
    after = json.loads(out.read_text())["after"]
    assert (after["prediction"], after["components"]["exact_match"]) == ("Ad", 0.0)


@pytest.mark.parametrize(
    ("code", "name", "status", "said"),
    [
        (BRIEF, "brevity", 0, "rescored_rewards:brevity"),
        (BROKEN, "broken", 1, "raised KeyError: 'goal'"),
    ],
)
def test_components_of_your_own_are_tried_and_failures_counted(
    tmp_path: Path,
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    name: str,
    status: int,
    said: str,
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "rescored_rewards", raising=False)
    (tmp_path / "rescored_rewards.py").write_text(code)
    run = write_run(tmp_path, {0: [("Ada", 1.0)]})
    component = f'reward.components={{"rescored_rewards:{name}"=1.0}}'
    arguments = ["rescore", str(run), "--config", str(config), "--set", component]
    assert cli.main(arguments) == status
    text = capsys.readouterr().out
    assert said in text
    assert ("!! 1 of 1 were not scored" in text) == (status == 1)


def test_a_stored_trajectory_is_what_the_reward_service_scored_but_for_its_tokens():
    record = trajectory(rollout_task(task=TASK), calls=[CALL])
    kept = readable(
        scored(rollout_task(task=TASK), calls=[CALL]), step=1, advantage=0, trained=True
    )
    asked = scorer.request_of(record, tokens=True)
    assert asked.token_ids
    without = scorer.request_of(record)
    assert without == asked.model_copy(update={"token_ids": []})
    assert request_of(json.loads(json.dumps(kept))) == without


def test_of_several_agents_only_what_the_main_one_wrote_is_scored_again():
    several = scored(**three_lineages())
    kept = readable(several, step=1, advantage=0, trained=True)
    assert request_of(json.loads(json.dumps(kept))) == scorer.request_of(several.trajectory)
    older = {**kept, "turns": kept["turns"][:1]}  # from before there were several
    del older["lineages"], older["turns"][0]["lineage"]
    assert [turn.text for turn in request_of(older).turns] == ["ask"]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_text_may_hold_what_ends_a_line_elsewhere(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], separator: str
):
    run = write_run(tmp_path, {0: [(f"Ada{separator}B", 1.0)]})
    (file,) = stored_files(run)
    (record,) = file.records()
    file.path.unlink()
    older = file.path.with_suffix(".jsonl")
    older.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    assert cli.main(["rescore", str(run), "--config", str(config)]) == 0
    assert capsys.readouterr().out.startswith("1 trajectories of 1 steps")


def test_a_folder_without_rewards_is_refused(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["rescore", str(tmp_path), "--config", str(config)]) == 2
    assert "has no folder trajectories" in capsys.readouterr().err
    (tmp_path / "trajectories").mkdir()
    assert cli.main(["rescore", str(tmp_path), "--config", str(config)]) == 2
    assert "has no stored trajectory with a reward" in capsys.readouterr().err
