"""Run folders that older versions wrote continue in this version, and are shown and scored.

`tests/contract/run_0_1_0`, `run_before_lineages` and `run_config_version_1` are such folders with
their model, tasks and reward: four steps of a tiny random model. The second is of the last version
whose turns did not say what they are; `searches.jsonl` has two trajectories of it that search. The
third is of the last version whose configuration had the keys of version 1. Paths in them begin with
a word that stands for where they lie.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli import main as cli
from agent_r1.config.run import Config, load_config
from agent_r1.launch import local_client
from agent_r1.learner.main import build_engine
from agent_r1.learner.train import Learner
from agent_r1_proto.streams import Broker
from tests.integration.test_learner_algorithms import LEARN_S, Services, answer
from tests.support.config_scene import run_spec
from tests.support.runs import finished

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Client = Callable[[Config], Coroutine[Any, Any, None]]
CONTRACT = Path(__file__).resolve().parents[1] / "contract"


def old_run(name: str, word: str, folder: Path) -> Path:
    """Copy a run of an older version, and return its run folder."""
    shutil.copytree(CONTRACT / name, folder)
    config = folder / "run" / "config.json"
    config.write_text(config.read_text().replace(word, str(folder)))
    return folder / "run"


def assert_went_on(run: Path) -> None:
    """Assert that two steps followed the four of the older version."""
    summary = json.loads((run / "summary.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    # 4 steps of 2 groups of 2 were trained before, 2 more now; version 4 was the last.
    assert (summary["status"], summary["steps"], summary["starts"]) == ("finished", 6, 2)
    assert summary["trajectories_trained"] == 24
    assert summary["policy_version"] > 4
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_the_oldest_run_goes_on(tmp_path: Path):
    run = old_run("run_0_1_0", "RUN_0_1_0", tmp_path / "old")
    finished("train", "--resume", run, "--set", "learner.steps=6")
    assert_went_on(run)


@pytest.mark.parametrize("name", ["run_before_lineages", "run_config_version_1"])
async def test_the_learner_goes_on_with_an_older_run(
    tmp_path: Path, redis_url: str, run_id: str, name: str
):
    run = old_run(name, "OLD_RUN", tmp_path / "old")
    keys = {"redis.url": redis_url, "run.id": run_id, "learner.steps": 6}
    options = [f"{key}={value}" for key, value in {**keys, "learner.canary_tokens": 0}.items()]
    config = load_config(run / "config.json", options).config
    spec = run_spec(config, resume=True).prepare()
    with build_engine(spec) as engine:
        async with (
            await Broker.connect(redis_url, run_id) as broker,
            Services(broker, answer=answer).running(),
        ):
            await asyncio.wait_for(Learner(spec, engine).run(), LEARN_S)
    assert_went_on(run)


def test_trajectories_of_a_version_that_read_no_turns_are_shown_and_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = old_run("run_before_lineages", "OLD_RUN", tmp_path / "old")
    shutil.copy(tmp_path / "old" / "searches.jsonl", run / "trajectories" / "step_000004.jsonl")

    assert cli.main(["show", str(run)]) == 0
    assert "model> <think> plan Ashstow Water" in capsys.readouterr().out

    weights = "exact_match=0.0,format=1.0,reasoning_format=0.0"
    out = tmp_path / "scores.jsonl"
    options = ["--set", f"reward.components={{{weights}}}", "--out", str(out)]
    assert cli.main(["rescore", str(run), *options]) == 0
    (after, _) = [json.loads(line)["after"] for line in out.read_text().splitlines()]
    # As the version that stored them scored them.
    assert after["prediction"] == "Belok Ebrak"
    assert after["components"] | {"format": 1.0, "reasoning_format": 1.0} == after["components"]


def test_a_run_with_keys_of_an_older_version_is_shown_scored_and_evaluated(
    tmp_path: Path,
    redis_url: str,
    run_id: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    run = old_run("run_config_version_1", "OLD_RUN", tmp_path / "old")
    assert cli.main(["show", str(run)]) == 0
    assert "vowels:share" in capsys.readouterr().out
    options = ["--set", "reward.components={answered=1.0}", "--out", str(tmp_path / "scores.jsonl")]
    assert cli.main(["rescore", str(run), *options]) == 0

    async def serve(config: Config, client: Client) -> None:
        redis = config.redis.model_copy(update={"url": redis_url})
        async with (
            await Broker.connect(redis_url, run_id) as broker,
            Services(broker, answer=answer).running(),
        ):
            await client(config.model_copy(update={"redis": redis}))

    monkeypatch.setattr(
        local_client, "run_client", lambda config, client, _: asyncio.run(serve(config, client))
    )
    out = tmp_path / "answers.jsonl"
    command = ["evaluate", str(run / "config.json"), "--set", f"run.id={run_id}"]
    assert cli.main([*command, "--policy", str(run), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 8  # tasks
    assert [row["id"] for row in rows if row["failed"]] == []


@pytest.mark.parametrize("name", ["run_before_lineages", "run_config_version_1"])
def test_a_checkpoint_of_an_older_version_is_exported(tmp_path: Path, name: str):
    run = old_run(name, "OLD_RUN", tmp_path / "old")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
