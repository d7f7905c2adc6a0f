"""The main job with every real part: vLLM, HTTP search, Redis, reward, DeepSpeed, weight pushes."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_r1.cli import main as cli
from agent_r1.cli.evaluation.asking import questioning
from agent_r1.cli.policy import with_policy
from agent_r1.config.run import Config, load_config
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.launch import local_client
from agent_r1_proto.tasks import Decoding
from tests.e2e.conftest import STEPS, ResumedRun
from tests.support.metrics_page import unexplained
from tests.support.runs import finished, processes_naming, steps

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
QUESTIONS = 8
"""Of each evaluation set."""
SUMMARY_FIELDS = {
    "algorithm",
    "steps",
    "seed",
    "wall_s",
    "em_before",
    "em_after",
    "sets",
    "reward_before",
    "reward_after",
    "components_before",
    "components_after",
    "calls_before",
    "calls_after",
    "trajectories_trained",
    "sampled_tokens",
    "tokens_per_s",
    "step_s",
    "rollout_s",
    "reward_s",
    "learn_s",
    "push_s",
    "max_staleness_seen",
    "canary_max_dlogp",
}


def test_every_step_is_there_once_after_kills_and_a_resume(resumed_run: ResumedRun):
    assert [line["step"] for line in steps(resumed_run.folder)] == list(range(1, STEPS + 1))


def test_every_number_of_a_step_is_explained_in_the_documentation(resumed_run: ResumedRun):
    names = {name for line in steps(resumed_run.folder) for name in line}
    assert len(names) > 60
    assert unexplained(names) == set()


def test_policy_versions_only_rise_and_are_never_used_twice(resumed_run: ResumedRun):
    lines = steps(resumed_run.folder)
    versions = [line["policy/version"] for line in lines]
    pushed = [line["policy/version"] for line in lines if "push/servers" in line]
    assert versions == sorted(versions)
    assert pushed == sorted(set(pushed))
    # The kill may have come before a step's weights were pushed: it names the version before.
    assert len(pushed) >= STEPS - 1


def test_nothing_is_left_in_the_folder_for_temporary_files(resumed_run: ResumedRun):
    assert resumed_run.left_behind == []


def test_other_machines_reach_nothing_without_the_token(resumed_run: ResumedRun):
    names = [name for name, _ in resumed_run.sockets]
    assert len(names) >= 4  # Redis, search, reward, rollout: the least that listens
    assert [name for name in names if name.startswith("0.0.0.0:")]  # rollout
    assert [name for name, exposed in resumed_run.sockets if exposed] == []


def test_no_process_survives_kill_9_of_the_launcher(resumed_run: ResumedRun):
    # Redis, search, reward, learner, rollout and its engine: the fixture has seen all of them end.
    assert len(resumed_run.killed) >= 6
    assert any("EngineCore" in title for title in resumed_run.killed.values())


def test_nothing_is_left_running(resumed_run: ResumedRun):
    assert processes_naming(str(resumed_run.folder)) == {}


def test_summary_has_every_field_and_they_agree(resumed_run: ResumedRun):
    summary = json.loads((resumed_run.folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_FIELDS
    assert summary["steps"] == STEPS
    assert summary["trajectories_trained"] == STEPS * 4 * 2
    assert summary["max_staleness_seen"] == 0
    in_domain = [summary["sets"][name] for name in ("hotpot_like", "wiki2_like")]
    for when in ("before", "after"):
        mean = sum(scores[when]["em"] for scores in in_domain) / 2
        assert summary[f"em_{when}"] == pytest.approx(mean)
        assert all(scores[when]["n"] == QUESTIONS for scores in in_domain)


def test_learner_and_rollout_agree_on_log_probabilities_after_every_push(resumed_run: ResumedRun):
    # The canary judges the mean; one token alone is rarely off by more than 1e-4 in float32.
    assert json.loads((resumed_run.folder / "summary.json").read_text())["canary_max_dlogp"] <= 5e-4
    assert all(line["logprob/abs_diff_mean"] <= 1e-5 for line in steps(resumed_run.folder))
    assert all(line["logprob/abs_diff_max"] <= 5e-4 for line in steps(resumed_run.folder))


def test_the_run_folder_holds_what_a_user_looks_for(resumed_run: ResumedRun):
    assert list((resumed_run.folder / "tensorboard").glob("events.*"))
    assert list((resumed_run.folder / "trajectories").glob("step_*.parquet"))
    config = json.loads((resumed_run.folder / "config.json").read_text())
    assert config["learner"]["group_size"] == 2
    newest = max((resumed_run.folder / "checkpoints").glob("step_*"))
    assert (newest / "model" / "config.json").is_file()
    assert {path.name for path in (resumed_run.folder / "logs").iterdir()} >= {
        "learner.log",
        "rollout.log",
        "reward.log",
        "search.log",
    }


def test_the_first_prompt_is_in_the_log_in_full(resumed_run: ResumedRun):
    log = (resumed_run.folder / "logs" / "rollout.log").read_text()
    assert re.search(r"first prompt .*\n(.*\n)*?<\|im_start\|>", log)


def test_show_prints_a_stored_trajectory(resumed_run: ResumedRun):
    printed = finished("show", resumed_run.folder, "--step", STEPS, "--limit", 1)
    assert "search" in printed
    assert "reward" in printed


def test_a_used_run_folder_is_refused_and_resume_named(
    resumed_run: ResumedRun, capsys: pytest.CaptureFixture[str]
):
    command = ["train", str(resumed_run.config), "--run-dir", str(resumed_run.folder)]
    assert cli.main(command) != 0
    assert f"--resume {resumed_run.folder}" in capsys.readouterr().err


MATRIX_TOML = """
config = {config}
results = "small"
methods = ["direct", "tools_multi_turn"]

[sets]
hotpotqa = "published.jsonl"

[[models]]
name = "trained"
policy = {policy}

[[decode]]
method = "greedy"

[[decode]]
method = "majority"
candidates = 2
"""


def write_matrix(folder: Path, run: ResumedRun, questions: Path) -> Path:
    """Write a matrix file of the run, and two questions as HotpotQA has them."""
    records = [
        {"_id": task["id"], "question": task["prompt"], "answer": task["payload"]["answers"][0]}
        for task in map(json.loads, questions.read_text().splitlines()[:2])
    ]
    (folder / "published.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    file = folder / "matrix.toml"
    paths = {"config": json.dumps(str(run.config)), "policy": json.dumps(str(run.folder))}
    file.write_text(MATRIX_TOML.format(**paths))
    return file


def run_matrix(file: Path, served: Config) -> None:
    """Run the command on services that run already: another start takes most of a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_client, "run_client", lambda _, ask, __: asyncio.run(ask(served)))
        assert cli.main(["matrix", str(file), "--out", str(file.parent)]) == 0


@dataclass(frozen=True)
class Evaluated:
    """What was asked of the run on one start of the services."""

    evaluations: list[EvaluationRun]
    """Greedy, and one that searches."""
    matrix: Path
    """Folder of the results of `agent-r1 matrix`."""


@pytest.fixture(scope="module")
def evaluated(resumed_run: ResumedRun, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    out = tmp_path_factory.mktemp("evaluated")
    options = ["reward.components={exact_match = 1.0, answered = 0.0, f1 = 0.0}"]
    config = with_policy(load_config(resumed_run.config, options).config, str(resumed_run.folder))
    decoding = Decoding(method="beam", candidates=3, keep=2, scorer="answered")
    greedy = questioning(config, "agent")
    searching = greedy.model_copy(
        update={"temperature": 1.0, "decoding": decoding, "max_questions": 2}
    )
    sets = {name: config.evaluation.sets[name] for name in ("hotpot_like", "wiki2_like")}
    evaluations = [
        EvaluationRun(sets=sets, questioning=how, out=out / f"{i}.jsonl")
        for i, how in enumerate((greedy, searching))
    ]
    matrix = write_matrix(out, resumed_run, sets["hotpot_like"].source)

    async def ask(served: Config) -> None:
        for evaluation in evaluations:
            await asyncio.to_thread(evaluation.ask, run=served.run, redis=served.redis)
        await asyncio.to_thread(run_matrix, matrix, served)

    local_client.run_client(config, ask, print)
    return Evaluated(evaluations, out)


def test_evaluate_scores_the_run_as_its_last_evaluation_did(
    resumed_run: ResumedRun, evaluated: Evaluated
):
    summary = json.loads((resumed_run.folder / "summary.json").read_text())
    rows = evaluated.evaluations[0].file.answers.values()
    for name in ("hotpot_like", "wiki2_like"):
        scores = [row.components["exact_match"] for row in rows if row.set == name]
        assert len(scores) == QUESTIONS
        # Greedy answers of the same weights; batch shapes differ, so one answer may flip.
        assert sum(scores) / QUESTIONS == pytest.approx(
            summary["sets"][name]["after"]["em"], abs=1.01 / QUESTIONS
        )


def test_a_matrix_has_a_cell_for_every_method_and_way_of_decoding(evaluated: Evaluated):
    found = json.loads((evaluated.matrix / "small.json").read_text())
    cells = {(c["method"], c["decode"]): c for c in found["cells"] if not c["missing"]}
    methods, decodings = ("direct", "tools_multi_turn"), ("greedy", "majority_2")
    assert cells.keys() == {(method, decode) for method in methods for decode in decodings}
    for cell in cells.values():
        assert (cell["n"], cell["failed"]) == (2, 0)
        assert cell["seconds"][0] > 0
        assert cell["sampled_tokens"][0] > 0
    assert cells["direct", "greedy"]["calls"][0] == 0  # it is offered no tool


def test_a_search_chooses_among_branches_with_the_real_engine_tools_and_reward(
    evaluated: Evaluated,
):
    rows = list(evaluated.evaluations[1].file.answers.values())
    assert [row.reason for row in rows if row.failed] == []
    assert len(rows) == 4
    for row in rows:
        assert row.discarded_calls is not None
        assert row.discarded_calls >= 0
        # The scorer gives 1 to a branch that has an answer, so none without one is taken.
        assert (row.status, row.components["answered"]) == ("COMPLETED", 1.0)
        assert row.scorer_tokens == 0  # it asks no model
    # Three candidates for every turn: most of what was sampled has been given up.
    words = sum(len(turn.text.split()) for row in rows for turn in row.turns)
    assert sum(row.sampled_tokens or 0 for row in rows) > 2 * words > 0
