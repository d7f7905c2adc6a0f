"""`agent_r1.load_run`: a run folder of any version, as configuration, numbers and frames."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import agent_r1
from agent_r1.runs.store import TrajectoryStore
from tests.support.builders import rollout_task, scored, stored
from tests.support.doc_blocks import blocks

DOCS = Path(__file__).parents[3] / "docs"
OLD_RUN = Path(__file__).parents[2] / "contract" / "run_before_lineages" / "run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "config.json").write_text('{"model": {"path": "org/model"}}')
    lines = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (tmp_path / "failures.jsonl").write_text('{"step": 1, "kind": "tool"}\n{"step": 2, "ki')
    store = TrajectoryStore(tmp_path, 1.0)
    for step in (1, 2):
        one = stored(scored(rollout_task(group_id=step), total=step / 4), step=step)
        store.write(f"step_{step:06d}", [one])
    store.write("eval_before", [stored(step=0, trained=False)])
    return tmp_path


def test_a_run_is_read_as_frames(folder: Path):
    run = agent_r1.load_run(folder)
    assert run.config["model"] == {"path": "org/model"}
    assert run.metrics["reward/mean"].to_dict() == {1: 0.5, 2: 0.75}
    frame = run.trajectories
    assert list(frame["reward/em"]) == [0.25, 0.5, 1.0]
    assert list(frame["evaluation"].isna()) == [True, True, False]
    row = frame.iloc[1]
    assert run.file(row.file).read(row.row).record["step"] == 2
    assert [one["step"] for one in run.rows(2, 2)] == [2]
    assert [one["step"] for one in run.rows(first=2)] == [2]
    assert (run.summary, run.evaluations) == ({}, [])


def test_the_example_of_the_page_runs(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (folder / "config.json").write_text('{"learner": {"group_size": 8}}')
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    (block,) = [one for one in blocks(DOCS / "run-folder.md") if one.language == "python"]
    exec(compile(block.text, str(block), "exec"), {})
    # The two samples that were trained, by their rewards.
    assert capsys.readouterr().out.count("<answer>Ada</answer>") == 2


def test_a_line_that_a_crash_has_cut_off_is_left_out(folder: Path):
    assert agent_r1.load_run(folder).events == [{"event": "failure", "step": 1, "kind": "tool"}]


def test_a_run_of_an_older_version_is_a_frame_too():
    run = agent_r1.load_run(OLD_RUN)
    assert {"reward/exact_match", "num_tokens", "file"} <= set(run.trajectories.columns)
    assert set(run.trajectories["step"]) == {4}


def test_an_empty_run_has_empty_frames(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    run = agent_r1.load_run(tmp_path)
    assert (len(run.metrics), len(run.trajectories)) == (0, 0)


def test_tokens_have_texts_where_the_tokenizer_is(tmp_path: Path):
    run = agent_r1.load_run(shutil.copytree(OLD_RUN, tmp_path / "run"))
    texts = run.token_texts([10, 11, 12])
    assert texts is not None
    assert len(texts) == 3
    assert all(texts)
    for model in run.path.glob("checkpoints/*/model"):
        shutil.rmtree(model)
    assert agent_r1.load_run(run.path).token_texts([10]) is None


def test_a_frame_without_pandas_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = agent_r1.load_run(folder)
    assert len(list(run.rows())) == 3
    with pytest.raises(ValueError, match=r"needs the package pandas.*agent-r1\[data\]"):
        _ = run.metrics


def test_what_is_no_run_folder_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"is no run folder: config\.json cannot be read"):
        agent_r1.load_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    run = agent_r1.load_run(tmp_path)
    with pytest.raises(ValueError, match="has no trajectories step_9"):
        run.file("step_9")
