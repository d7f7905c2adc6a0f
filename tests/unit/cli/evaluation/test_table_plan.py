"""What a table file becomes: resolved runs, or an error that names the method and the key."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from agent_r1.cli import main as cli
from agent_r1.cli.evaluation.settings import flat_settings
from agent_r1.cli.evaluation.table_plan import (
    TablePlan,
    check_runs,
    chosen,
    read_plan,
)
from agent_r1.config.run import write_config
from agent_r1.config.sources import ConfigError
from agent_r1.evaluation.experiments.config import TableFile
from agent_r1.evaluation.experiments.estimates import tokens_to
from tests.support.config_scene import load_nothing, write_scene

TABLE_TOML = """
config = "run.toml"
results = "results/small"
seeds = [0, 7]
baselines = ["naive_rag"]

[defaults]
"engine.lr" = 1e-4
learner.group_size = 6

[[methods]]
name = "ppo"
title = "PPO"
set = { "learner.algorithm" = "ppo", "learner.critic_lr" = 2e-3 }

[[methods]]
name = "grpo"
set = { "learner.algorithm" = "grpo" }

[[methods]]
name = "grpo_masks"
table = "ablation"
set = { "learner.algorithm" = "grpo" }
"""
REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_nothing(monkeypatch)
    return write_scene(tmp_path / "example").parent


def plan_of(folder: Path, text: str = TABLE_TOML, *options: str) -> TablePlan:
    file = folder / "table.toml"
    file.write_text(text)
    return read_plan(file, options, folder / "out")


def test_a_method_may_have_seeds_of_its_own(folder: Path):
    text = TABLE_TOML.replace('name = "ppo"', 'name = "ppo"\nseeds = [0, 1, 2]')
    plan = plan_of(folder, text)
    assert {m.name: [run.seed for run in m.runs] for m in plan.methods} == {
        "ppo": [0, 1, 2],
        "grpo": [0, 7],
        "grpo_masks": [0, 7],
    }


@pytest.mark.parametrize(
    ("contrast", "message"),
    [
        ('first = "ppo"\nsecond = "dpo"', "contrasts names 'dpo'"),
        ('first = "ppo"\nsecond = "grpo"\nset = "other"', "names the set 'other'.*held_out"),
        ('first = "ppo"\nsecnd = "grpo"', "secnd.*second"),
    ],
)
def test_a_contrast_of_what_the_table_lacks_is_refused(folder: Path, contrast: str, message: str):
    with pytest.raises(ConfigError, match=message):
        plan_of(folder, f"{TABLE_TOML}\n[[contrasts]]\n{contrast}\n")


@pytest.mark.parametrize(("num_seeds", "allowed"), [(16, True), (17, False)])
def test_a_contrast_over_more_seeds_than_its_test_takes_is_refused_beforehand(
    num_seeds: int, allowed: bool
):
    table = {
        "config": "run.toml",
        "results": "small",
        "seeds": list(range(num_seeds)),
        "methods": [{"name": "ppo"}, {"name": "grpo"}, {"name": "rloo", "seeds": [0, 1]}],
        "contrasts": [{"first": "ppo", "second": "grpo"}, {"first": "ppo", "second": "rloo"}],
    }
    if allowed:
        assert len(TableFile.model_validate(table).contrasts) == 2
        return
    with pytest.raises(ValueError, match=r"'ppo' and 'grpo' over 17 seeds.* takes at most 16"):
        TableFile.model_validate(table)


def test_a_method_may_begin_with_a_model_of_its_own_for_every_seed(folder: Path):
    for seed in (0, 7):
        shutil.copytree(folder / "model", folder / f"tuned{seed}", symlinks=True)
    settings = '"model.path" = "tuned{seed}", "learner.steps" = 0'
    text = f'{TABLE_TOML}\n[[methods]]\nname = "sft"\nset = {{ {settings} }}\n'
    runs = plan_of(folder, text).methods[-1].runs
    assert [run.config.model.path for run in runs] == [
        str(folder / "tuned0"),
        str(folder / "tuned7"),
    ]


def test_an_average_over_what_is_not_asked_is_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"average names the set 'other'.*held_out"):
        plan_of(folder, f'average = ["other"]\n{TABLE_TOML}')
    assert plan_of(folder, f'average = ["held_out"]\n{TABLE_TOML}').asked.average == ["held_out"]


def with_set(key: str, value: object) -> str:
    """Return a table whose one method sets one key."""
    head = TABLE_TOML.split("[[methods]]")[0]
    return f'{head}\n[[methods]]\nname = "odd"\nset = {{ "{key}" = {json.dumps(value)} }}\n'


def test_every_method_has_a_run_a_seed(folder: Path):
    plan = plan_of(folder)
    ppo = plan.methods[0]
    assert [run.folder for run in ppo.runs] == [
        folder / "out" / "runs" / "ppo_seed0",
        folder / "out" / "runs" / "ppo_seed7",
    ]
    config = ppo.runs[1].config
    assert (config.run.seed, config.run.dir) == (7, ppo.runs[1].folder)
    assert (config.learner.algorithm, config.learner.advantage) == ("ppo", "gae")
    assert (config.learner.critic_lr, config.engine.lr, config.learner.group_size) == (
        2e-3,
        1e-4,
        6,
    )
    evaluation = config.evaluation
    assert (evaluation.before, evaluation.every, evaluation.after) == (False, 0, True)
    assert plan.results == folder / "out" / "small"


def test_a_run_with_the_same_settings_serves_both_tables(folder: Path):
    plan = plan_of(folder)
    assert list(plan.methods[2].runs) == list(plan.methods[1].runs)
    assert len(plan.runs()) == 4
    assert [run.seed for run in plan.runs()] == [0, 0, 7, 7]
    assert [run.method for run in plan.runs(["grpo_masks"])] == ["grpo", "grpo"]


def test_the_command_line_comes_over_defaults_and_a_method_over_both(folder: Path):
    plan = plan_of(folder, TABLE_TOML, "engine.lr=5e-5", "learner.algorithm=rloo")
    assert (plan.base.engine.lr, plan.base.learner.algorithm) == (5e-5, "rloo")
    ppo = plan.methods[0].runs[0].config
    assert (ppo.engine.lr, ppo.learner.algorithm) == (5e-5, "ppo")


def test_paths_of_a_table_mean_its_own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "more.jsonl").write_text((folder / "held_out.jsonl").read_text())
    monkeypatch.chdir("/")
    text = TABLE_TOML.replace("[defaults]", '[defaults]\n"evaluation.sets.held_out" = "more.jsonl"')
    assert plan_of(folder, text).base.evaluation.sets["held_out"].source == folder / "more.jsonl"


def test_the_runs_of_a_table_cannot_share_a_store(folder: Path):
    text = with_set("learner.checkpoint_url", "s3://bucket/x")
    with pytest.raises(ConfigError, match=r"holds one run, .* share their run\.id; remove it"):
        plan_of(folder, text)


def test_a_table_needs_its_measure_as_a_component(folder: Path):
    without = 'reward.components={"answered" = 1.0}'
    with pytest.raises(
        ConfigError, match=r"or set reward\.components = { answered = 1\.0, exact_match = 0\.0 }"
    ):
        plan_of(folder, TABLE_TOML, without)
    assert plan_of(folder, TABLE_TOML, 'reward.components={"answered" = 1.0, "exact_match" = 0.0}')
    assert (
        plan_of(folder, f'measure = "answered"\n{TABLE_TOML}', without).asked.measure == "answered"
    )
    with pytest.raises(
        ConfigError, match=r"measures exact_match only; .*, or set .*answered = 0\.0 }"
    ):
        plan_of(folder, f'measure = "answered"\n{TABLE_TOML}')
    of_the_rule = 'reward={rule = "paper", components = {"answered" = 0.0}}'
    assert (
        plan_of(folder, f'measure = "format"\n{TABLE_TOML}', of_the_rule).asked.measure == "format"
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("env.max_turns", 3, r"'odd': env.max_turns \(3\) differs .* move it to \[defaults\]"),
        ("rollout.max_concurrent", 3, r"'odd': rollout.max_concurrent \(3\) differs"),
        ("model.max_context", 500, r"'odd': model.max_context \(500\) differs"),
        ("reward.port", 1, r"'odd': reward.port \(1\) differs"),
        ("tools.search.top_k", 5, r"'odd': tools.search.top_k \(5\) differs"),
        ("evaluation.max_questions", 5, "would answer different questions"),
        ("evaluation.temperature", 0.5, "would answer different questions"),
        ("learner.stepz", 5, "'odd': unknown key 'stepz' .* the nearest known one is 'steps'"),
        ("learner.lam", 0.5, r"'odd': .*learner.lam \(0.5\) is not used with advantage"),
        ("learner.loss_mask", False, "'odd': .*set advantage_mask = false too"),
        ("run.seed", 3, "'odd': run.seed is set by the table itself"),
        ("evaluation.every", 3, "'odd': evaluation.every is set by the table itself"),
    ],
)
def test_a_method_that_cannot_run_beside_the_others_is_refused(
    folder: Path, key: str, value: object, expected: str
):
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        plan_of(folder, with_set(key, value))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seeds =", "seds =", "unknown table 'seds' .* nearest known one is 'seeds'"),
        ("title =", "titel =", "unknown key 'titel'|unknown table 'titel'"),
        ("[0, 7]", "[0, 0]", "seeds has 0 twice"),
        ("[0, 7]", "[]", "seeds"),
        ('"grpo_masks"', '"grpo"', "methods has 'grpo' twice"),
        ('"naive_rag"', '"naive"', "naive_rag"),
        ('"run.toml"', '"gone.toml"', "no configuration file"),
        ('"ablation"', '"other"', "ablation"),
    ],
)
def test_a_table_file_is_strict(folder: Path, old: str, new: str, expected: str):
    with pytest.raises(ConfigError, match=expected):
        plan_of(folder, TABLE_TOML.replace(old, new))


def test_only_names_methods_of_the_table():
    known = ["naive_rag", "ppo", "grpo"]
    assert chosen("--only", "ppo, naive_rag", known) == ["ppo", "naive_rag"]
    assert chosen("--only", None, known) is None
    with pytest.raises(ConfigError, match="'pppo'; the table has naive_rag, ppo, grpo"):
        chosen("--only", "pppo", known)
    with pytest.raises(ConfigError, match="--seeds is empty; name one of 0, 7"):
        chosen("--seeds", " ,", [0, 7])


def test_a_run_with_other_settings_is_named_with_the_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    run = plan_of(folder).methods[0].runs[0]
    run.folder.mkdir(parents=True)
    write_config(run.config, run.folder / "config.json")
    (run.folder / "summary.json").write_text('{"status": "finished"}')
    arguments = ["table", str(folder / "table.toml"), "--out", str(folder / "out")]
    assert cli.main([*arguments, "--only", "ppo", "--set", "engine.lr=0.5"]) == 2
    text = capsys.readouterr().err
    assert "engine.lr is 0.0001 there and 0.5 here" in text
    assert "--only ppo --set engine.lr=0.5 --overwrite" in text


def test_a_function_of_a_method_is_loaded_before_anything_starts(tmp_path: Path):
    folder = write_scene(tmp_path / "example").parent
    without_methods = TABLE_TOML.partition("[[methods]]")[0]
    odd = without_methods + '[[methods]]\nname = "odd"\nset = { learner.advantage = "own:f" }\n'
    plan = plan_of(folder, odd)
    with pytest.raises(ConfigError, match=r"'odd': learner.advantage .* No module named 'own'"):
        check_runs(plan, plan.runs())


def test_only_what_will_run_needs_its_model(folder: Path):
    shutil.copytree(folder / "model", folder / "tuned0", symlinks=True)
    tuned = '[[methods]]\nname = "sft"\nset = { "model.path" = "./tuned{seed}" }\n'
    plan = plan_of(folder, f"{TABLE_TOML}\n{tuned}")
    check_runs(plan, plan.runs(["sft"], ["0"]))
    check_runs(plan, plan.runs(["grpo", "ppo"]))
    with pytest.raises(ConfigError, match=r"'sft': .*model\.path \(.*tuned7\) is not a folder"):
        check_runs(plan, plan.runs(["sft", "ppo"]))


def test_where_a_run_lies_is_no_setting_of_it(folder: Path):
    runs = plan_of(folder).methods[0].runs
    here, there = (flat_settings(run.config) for run in runs)
    assert {key for key in here if here[key] != there[key]} == {"run.seed"}


def test_the_table_of_the_tiny_world_asks_for_the_papers_rows():
    plan = read_plan(REPOSITORY / "examples" / "tiny_world" / "table.toml")
    titles = {part: [m.title for m in plan.methods if m.table == part] for part in ("methods",)}
    assert titles["methods"] == ["PPO", "GRPO", "REINFORCE++", "REINFORCE++-baseline", "RLOO"]
    # 9 settings (one GRPO serves both tables) x 3 seeds.
    assert len(plan.runs()) == 27
    budgets = {
        (c.learner.steps, c.learner.groups_per_batch, c.learner.group_size)
        for c in (run.config for run in plan.runs())
    }
    assert budgets == {(50, 16, 8)}
    masks = {
        m.name: (m.runs[0].config.learner.loss_mask, m.runs[0].config.learner.advantage_mask)
        for m in plan.methods
        if m.table == "ablation"
    }
    assert masks == {
        "ppo_masks": (True, True),
        "ppo_no_advantage_mask": (True, False),
        "ppo_no_masks": (False, False),
        "grpo_masks": (True, True),
        "grpo_no_masks": (False, False),
    }


def test_the_table_of_the_deep_world_tests_four_contrasts_on_eight_seeds(tmp_path: Path):
    plan = read_plan(REPOSITORY / "examples" / "deep_world" / "table.toml", out=tmp_path)
    seeds = {method.name: len(method.runs) for method in plan.methods}
    assert len(plan.asked.contrasts) == 4
    assert {seeds[c.first] for c in plan.asked.contrasts} == {8}
    assert {seeds[c.second] for c in plan.asked.contrasts} == {8}
    # Learning rates are chosen on the development set.
    assert "development" not in plan.base.evaluation.sets
    assert plan.asked.average == ["in_domain", "longer", "compositions", "wording"]
    # 6 settings with 8 seeds (one GRPO serves both tables), 7 with 3.
    assert len(plan.runs()) == 6 * 8 + 7 * 3


def test_the_tables_of_tiny_code_differ_in_the_text_of_errors_alone():
    example = REPOSITORY / "examples" / "tiny_code"
    plans = [read_plan(example / name) for name in ("table.toml", "table_silent.toml")]
    for plan in plans:
        assert plan.asked.measure == "trials:all_tests_passed"
        # Choices are made on the development set.
        assert list(plan.base.evaluation.sets) == ["in_domain", "compositions"]
        assert [run.seed for run in plan.runs()] == [0, 1, 2]
    here, there = (flat_settings(plan.base) for plan in plans)
    assert {key for key in here.keys() | there.keys() if here.get(key) != there.get(key)} == {
        "run.id",
        "tools.python_exec.settings.show_errors",
    }
    # A cell of one is no cell of the other.
    assert plans[0].cells_folder == plans[1].cells_folder
    shown, silent = ({run.folder.name for run in plan.runs()} for plan in plans)
    assert not shown & silent


def test_the_learning_rates_of_the_deep_world_come_from_one_grid_and_its_development_set(
    tmp_path: Path,
):
    example = REPOSITORY / "examples" / "deep_world"
    search = read_plan(example / "learning_rates.toml", out=tmp_path)
    table = read_plan(example / "table.toml", out=tmp_path)
    assert set(search.base.evaluation.sets) == {"development"}
    assert not {run.seed for run in search.runs()} & {run.seed for run in table.runs()}
    configs = [run.config for run in search.runs()]
    assert {c.learner.steps for c in configs} == {table.base.learner.steps}
    rates = [(c.learner.algorithm, c.engine.lr) for c in configs]
    assert rates == [(name, rate) for name in ("grpo", "ppo") for rate in (1e-4, 2e-4, 4e-4)]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_table_of_the_deep_world_takes_the_learning_rates_that_its_rule_chose(
    algorithm: str, tmp_path: Path
):
    example = REPOSITORY / "examples" / "deep_world"
    search = read_plan(example / "learning_rates.toml")
    scores: dict[float, float] = {}
    for run in search.runs():
        if run.config.learner.algorithm == algorithm:
            cell = search.read_cell(run)
            assert cell is not None
            answered = [score for score in cell.scores["development"] if score is not None]
            scores[run.config.engine.lr] = fmean(answered)
    assert len(scores) == 3
    best = min(rate for rate, score in scores.items() if score == max(scores.values()))
    table = read_plan(example / "table.toml", out=tmp_path)
    trained = [run.config for run in table.runs()]
    critic = [c for c in trained if c.learner.has_critic]
    of_kind = critic if algorithm == "ppo" else [c for c in trained if not c.learner.has_critic]
    assert {c.engine.lr for c in of_kind} == {best}
    assert {round(c.learner.critic_lr / c.engine.lr, 6) for c in critic} == {10.0}


def test_estimators_that_credit_turns_are_chosen_at_equal_rewards_and_on_no_reported_set(
    tmp_path: Path,
):
    example = REPOSITORY / "examples" / "deep_world"
    choice = read_plan(example / "turn_credit.toml", out=tmp_path)
    table = read_plan(example / "table.toml", out=tmp_path)
    assert choice.asked.threshold == table.asked.threshold
    assert set(choice.base.evaluation.sets) == {"development"}
    assert not {run.seed for run in choice.runs()} & {run.seed for run in table.runs()}
    configs = [run.config for run in choice.runs()]
    seeds = Counter(config.learner.algorithm for config in configs)
    assert seeds == {"grpo": 3, "turn_ppo": 3, "mt_grpo": 3, "gigpo": 3}
    assert all(c.env.options["fact_reward"] == 0.5 for c in configs)
    assert {c.learner.process_rewards for c in configs} == {"none"}  # as they are
    rates = {run.config.learner.has_critic: run.config.engine.lr for run in table.runs()}
    assert {c.learner.has_critic: c.engine.lr for c in configs} == rates


def test_the_estimator_that_is_compared_on_other_seeds_is_the_one_that_its_rule_chose(
    tmp_path: Path,
):
    example = REPOSITORY / "examples" / "deep_world"
    choice = read_plan(example / "turn_credit.toml")
    confirmation = read_plan(example / "turn_credit_confirmed.toml", out=tmp_path)
    threshold = choice.asked.threshold
    assert threshold is not None
    assert threshold == confirmation.asked.threshold
    spent: dict[str, float] = {}
    for method in choice.methods[1:]:  # the first is what they are compared with
        runs = [cell for run in method.runs if (cell := choice.read_cell(run)) is not None]
        assert len(runs) == 3
        # A run that never reaches the threshold counts with all its tokens.
        tokens = [tokens_to(run, threshold) or sum(run.tokens) for run in runs]
        spent[method.name] = fmean(tokens)
    chosen = min(spent, key=lambda name: spent[name])
    assert [method.name for method in confirmation.methods] == ["facts_grpo", chosen]
    assert [run.seed for run in confirmation.methods[1].runs] == list(range(8))
    chosen_settings, confirmed = (
        next(method.runs[0].config for method in plan.methods if method.name == chosen)
        for plan in (choice, confirmation)
    )
    assert chosen_settings.learner == confirmed.learner
    assert chosen_settings.env == confirmed.env


def test_a_learned_reward_is_compared_with_labels_by_the_same_algorithm_seeds_and_questions(
    tmp_path: Path,
):
    example = REPOSITORY / "examples" / "deep_world"
    labels = read_plan(example / "unlabelled_true.toml", out=tmp_path)
    learned = read_plan(example / "unlabelled_learned.toml", out=tmp_path)
    (true_labels,) = labels.methods
    held = learned.methods[0]
    assert [run.seed for run in held.runs] == [run.seed for run in true_labels.runs]
    assert labels.base.evaluation.sets == learned.base.evaluation.sets
    here, there = (flat_settings(method.runs[0].config) for method in (true_labels, held))
    differs = {key for key in here.keys() | there.keys() if here.get(key) != there.get(key)}
    assert {key for key in differs if key.startswith(("data.", "env.", "tools."))} == set()
    assert {key for key in differs if key.startswith("learner.")} == {
        "learner.kl",
        "learner.kl_coef",
        "learner.kl_estimator",
        "learner.trajectories_per_step",
    }
    # The answers are looked at and not rewarded.
    components = held.runs[0].config.reward.components
    assert components == {
        "reward_model": 1.0,
        "catalogue:right_within_budget": 0.0,
        "exact_match": 0.0,
        "f1": 0.0,
    }
