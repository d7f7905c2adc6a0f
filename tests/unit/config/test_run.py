"""Reading the configuration: sources and their order, unknown names, paths, secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agent_r1.config.run import (
    Config,
    ConfigError,
    LoadedConfig,
    dump_config,
    load_config,
    write_config,
)
from agent_r1.config.sources import OTHER_NAMES, known_keys
from tests.conftest import REPOSITORY
from tests.support.config_scene import RUN_TOML, search_of, write_scene


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_scene(tmp_path / "example")


def load(file: Path, *options: str, **environ: str) -> LoadedConfig:
    return load_config(file, options, environ)


def test_later_sources_win_and_each_value_knows_its_source(file: Path):
    environ = {"AGENT_R1__LEARNER__GROUP_SIZE": "6", "AGENT_R1__LEARNER__STEPS": "7"}
    loaded = load(file, "learner.steps=9", **environ)
    learner = loaded.config.learner
    assert (learner.groups_per_batch, learner.group_size, learner.steps) == (2, 6, 9)
    assert loaded.origin(("learner", "groups_per_batch")) == f"file {file}"
    assert loaded.origin(("learner", "group_size")) == "variable AGENT_R1__LEARNER__GROUP_SIZE"
    assert loaded.origin(("learner", "steps")) == "--set learner.steps"
    assert loaded.origin(("learner", "max_staleness")) == "default"
    preset = load(file, "learner.algorithm=dapo")
    assert preset.origin(("learner", "drop_overlong")) == "preset learner.algorithm = dapo"
    assert preset.origin(("learner", "clip_low")) == "default"


@pytest.mark.parametrize(
    ("option", "read", "expected"),
    [
        ("learner.steps=12", lambda c: c.learner.steps, 12),
        ("learner.steps=none", lambda c: c.learner.steps, None),
        ("engine.lr=3e-4", lambda c: c.engine.lr, 3e-4),
        ("data.shuffle=false", lambda c: c.data.shuffle, False),
        ("run.id=seven", lambda c: c.run.id, "seven"),
        ("run.id=7", lambda c: c.run.id, "7"),  # a text field takes its text as it stands
        ('run.id="7"', lambda c: c.run.id, "7"),
        ("env.enable_tools=[]", lambda c: c.env.enable_tools, []),
        ("env.enable_tools=['search']", lambda c: c.env.enable_tools, ["search"]),
        ("env.system_prompt=a = b", lambda c: c.env.system_prompt, "a = b"),
        ("tools.search.top_k=5", lambda c: search_of(c).top_k, 5),
        ("reward.components={f1 = 0.5}", lambda c: c.reward.components, {"f1": 0.5}),
        ("learner={steps = 4}", lambda c: c.learner.steps, 4),
        (
            "env.chat_template_kwargs.think=true",
            lambda c: c.env.chat_template_kwargs["think"],
            True,
        ),
    ],
)
def test_set_takes_toml_values_and_bare_text(file: Path, option: str, read, expected):
    assert read(load(file, option).config) == expected


@pytest.mark.parametrize(
    ("variable", "text", "read", "expected"),
    [
        ("AGENT_R1__ENV__MAX_TURNS", "3", lambda c: c.env.max_turns, 3),
        ("AGENT_R1__TOOLS__SEARCH__TOP_K", "4", lambda c: search_of(c).top_k, 4),
        (
            "AGENT_R1__TOOLS__SEARCH__URL",
            "http://h:1",
            lambda c: c.tools["search"].url,
            "http://h:1",
        ),
        ("AGENT_R1__REDIS__URL", "redis://h/0", lambda c: c.redis.url, "redis://h/0"),
        ("AGENT_R1__MODEL__DTYPE", "bfloat16", lambda c: c.model.dtype, "bfloat16"),
        ("AGENT_R1__LEARNER__STEPS", "none", lambda c: c.learner.steps, None),
    ],
)
def test_variables_reach_every_table(file: Path, variable: str, text: str, read, expected):
    assert read(load(file, **{variable: text}).config) == expected


def test_a_variable_finds_a_tool_whose_name_has_capitals_and_dashes(tmp_path: Path):
    toml = RUN_TOML + '\n[tools.Web-search]\ncorpus = "corpus.jsonl"\n'
    file = write_scene(tmp_path / "x", toml)
    config = load(file, AGENT_R1__TOOLS__WEB_SEARCH__TOP_K="9").config
    assert search_of(config, "Web-search").top_k == 9
    assert sorted(config.tools) == ["Web-search", "search"]


def test_other_variables_of_ours_are_left_alone(file: Path):
    assert load(file, AGENT_R1_PARENT_PID="1", AGENT_R10="x").config.run.id == "demo"


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("lerner.steps=3", ["unknown table 'lerner'", "--set lerner.steps", "'learner'"]),
        ("learner.stepz=3", ["unknown key 'stepz' in table [learner]", "'steps'"]),
        ("tools.search.topk=3", ["unknown key 'topk' in table [tools.search]", "'top_k'"]),
        ("rollout.max_turns=3", ["env.max_turns or learner.max_turns?"]),
        ("learner.weights_server.port=1", ["weights_server (--set", "learner.server now"]),
        ("learner.steps", ["is not KEY=VALUE"]),
        ("=3", ["is not KEY=VALUE"]),
        ("learner=3", ["learner (3, --set learner) must be a table"]),
        ("learner.steps=many", ["learner.steps ('many')", "integer", "[--set learner.steps]"]),
        ("learner.steps=-1", ["learner.steps (-1)", "greater than or equal to 0"]),
        ("learner.temperature=0.005", ["learner.temperature (0.005)", "equal to 0.01"]),
        ("learner.temperature=2.5", ["learner.temperature (2.5)", "equal to 2"]),
        ("evaluation.temperature=0.005", ["(0.005) must be 0, which is greedy, or at least 0.01"]),
        ("rollout.model_runner=v3", ["rollout.model_runner ('v3')", "'v1' or 'v2'"]),
        ("learner.group_size=1", ["group_size (1)", "must be >= 2", "raise group_size"]),
        ("evaluation.patience=2", ["evaluation.patience (2)", "set evaluation.every"]),
        ("evaluation.score=em", ["evaluation.score ('em')", "['reward', 'exact_match']"]),
        (
            "evaluation.score=f1",
            ["which alone are measured", "set reward.components = { exact_match = 1.0, f1 = 0.0 }"],
        ),
        ("evaluation.score=desk:brief", ['exact_match = 1.0, "desk:brief" = 0.0 }']),
        ("evaluation.score=format", ["evaluation.score ('format')", "1.0, format = 0.0 }"]),
        ("reward.components={f1 = 0.0}", ["weight, such as exact_match = 1.0"]),
        ("model.dtype=float8", ["model.dtype ('float8')", "'bfloat16'"]),
        ("redis.url=localhost", ["redis.url ('localhost') must start with redis://"]),
        ("env.max_tokens_per_turn=512", ["must be smaller than model.max_context (512)"]),
        ("env.enable_tools=['serch']", ["env.enable_tools names 'serch'", "['search']"]),
        ("tools.redis.url=http://h:1", ["[tools.redis] has the name of another service"]),
        ("tools.a__b.url=http://h:1", ["[tools.a__b]", "not a usable name"]),
        ("model={max_context = 3}", ["model.max_context (3)"]),
    ],
)
def test_a_wrong_option_is_explained(file: Path, option: str, parts: list[str]):
    with pytest.raises(ConfigError) as caught:
        load(file, option)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "parts"),
    [
        ("AGENT_R1__ENV__MAXTURNS", ["variable AGENT_R1__ENV__MAXTURNS", "'max_turns'"]),
        ("AGENT_R1__LEARNR__STEPS", ["unknown table 'learnr'", "'learner'"]),
        ("agent_r1__env__maxturns", ["'max_turns'"]),
        ("AGENT_R1__TOOLS__SEARCH__TOPK", ["'top_k'"]),
        ("AGENT_R1__LEARNER__WEIGHTS_SERVER__PORT", ["weights_server (var", "learner.server now"]),
    ],
)
def test_an_unknown_variable_is_refused(file: Path, variable: str, parts: list[str]):
    with pytest.raises(ConfigError) as caught:
        load(file, **{variable: "3"})
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "parts"),
    [
        ("[run\n", ["does not parse", "line 1"]),
        ("[model]\npath = 'm'\npth = 'x'\n", ["unknown key 'pth' in table [model]", "'path'"]),
        ("[learner.weights_server]\nport = 1\n", ["weights_server (", "learner.server now"]),
        ("run = 3\n", ["run (3, ", "must be a table"]),
        ("[run]\nid = 'a'\n", ["model is required"]),
        ("[model]\npath='m'\n[tools]\nsearch = 1\n", ["tools.search (1, ", "must be a table"]),
        ("[model]\npath='m'\n[tools.search]\n", ['type = "search" needs corpus']),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, toml: str, parts: list[str]):
    file = tmp_path / "run.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load(file)
    for part in parts:
        assert part in str(caught.value)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no configuration file .*nothing\.toml"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="is a folder; name the configuration file in it"):
        load(tmp_path)


def test_every_problem_is_reported_at_once(file: Path):
    with pytest.raises(ConfigError) as caught:
        load(file, "learner.epochs=0", "env.max_turns=0")
    assert "learner.epochs (0)" in str(caught.value)
    assert "env.max_turns (0)" in str(caught.value)


def test_inputs_are_found_from_the_file_and_outputs_from_here(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load(file, "data.train=['mine.jsonl']", "evaluation.sets.mine=m.jsonl").config
    example = file.parent
    assert config.model.path == str(example / "model")
    assert search_of(config).corpus == example / "corpus.jsonl"
    assert config.evaluation.sets["held_out"].source == example / "held_out.jsonl"
    assert config.run.folder() == elsewhere / "runs" / "demo"
    # What is typed into a terminal is relative to where the terminal is.
    assert config.data is not None
    assert [one.source for one in config.data.train] == [elsewhere / "mine.jsonl"]
    assert config.evaluation.sets["mine"].source == elsewhere / "m.jsonl"


def test_the_name_of_a_model_on_a_hub_stays_a_name(file: Path):
    assert load(file, "model.path=Qwen/Qwen2.5-3B").config.model.path == "Qwen/Qwen2.5-3B"


def test_the_written_config_reads_back_the_same_from_anywhere(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = load(file, "tools.calc={type = 'm:C', settings = {a = 1}}").config
    written = tmp_path / "config.json"
    write_config(config, written)
    here = Path.cwd()
    monkeypatch.chdir(tmp_path)
    again = load(written).config
    assert again.run.folder() == here / "runs" / "demo"
    assert again.model_copy(update={"run": config.run}) == config


def test_a_wrong_secret_is_not_shown(file: Path):
    judge = '\n[reward.servers.judge]\nmodel = "m"\nurl = "http://h"\napi_key = ["s3cret"]\n'
    with pytest.raises(ConfigError, match=r"judge\.api_key: Input should be") as caught:
        load(write_text(file, RUN_TOML + judge))
    assert "s3cret" not in str(caught.value)


def test_secrets_are_left_out_of_the_written_config(file: Path, tmp_path: Path):
    environ = {
        "AGENT_R1__REDIS__URL": "rediss://me:hunter2@h:1/0",
        "AGENT_R1__TOOLS__SEARCH__URL": "https://u:s3cret@search.example/x",
    }
    config = load(file, "env.chat_template_kwargs.api_key=abc123", **environ).config
    written = tmp_path / "config.json"
    secrets = write_config(config, written)
    text = written.read_text()
    for secret in ("hunter2", "s3cret", "abc123"):
        assert secret not in text
    assert json.loads(text)["redis"]["url"] == "rediss://me:***@h:1/0"
    assert secrets["AGENT_R1__REDIS__URL"] == environ["AGENT_R1__REDIS__URL"]
    assert secrets["AGENT_R1__TOOLS__SEARCH__URL"] == environ["AGENT_R1__TOOLS__SEARCH__URL"]
    assert load(written, **secrets).config.redis.url == config.redis.url
    del secrets["AGENT_R1__REDIS__URL"]
    with pytest.raises(ConfigError, match=r"redis\.url is a secret.*AGENT_R1__REDIS__URL"):
        load(written, **secrets)


def test_a_url_without_a_password_is_no_secret(file: Path):
    values, secrets = dump_config(load(file, "redis.url=redis://h:1/0").config)
    assert values["redis"]["url"] == "redis://h:1/0"
    assert secrets == {}


def test_turns_are_read_in_the_format_that_is_configured(file: Path):
    call = '<think>a</think>[TOOL_CALLS][{"name": "search", "arguments": {}}]'
    options = ["tools.search.corpus=corpus.jsonl", "env.tool_format=mistral"]
    scored = "reward.components={exact_match = 1.0, format = 0.1}"
    turn = load(file, *options, scored).config.turn_reader().read(call)
    assert (len(turn.calls), turn.well_formed) == (1, True)


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        ("{}", ["exact_match"]),
        ("{components = {exact_match = 1.0, f1 = 0.0}}", ["exact_match", "f1"]),
        ("{rule = 'paper'}", ["exact_match", "format"]),
        ("{rule = 'paper', components = {f1 = 0.0}}", ["exact_match", "format", "f1"]),
    ],
)
def test_what_is_measured_is_shown_and_may_be_the_score(file: Path, reward: str, shown: list[str]):
    for score in shown:
        config = load(file, f"reward={reward}", f"evaluation.score={score}").config
        assert list(config.score_names().components) == shown


@pytest.mark.parametrize("score", ["f1", "own.rewards:passed"])
@pytest.mark.parametrize("reward", ["{}", "{rule = 'paper'}", "{components = {answered = 0.125}}"])
def test_advice_on_what_to_measure_can_be_pasted(tmp_path: Path, score: str, reward: str):
    file = write_scene(tmp_path / "x")
    given = (f"reward={reward}", f"evaluation.score={score}")
    with pytest.raises(ConfigError) as refused:
        load(file, *given)
    [advice] = re.findall(r"set (reward\.components = \{.*?\})", str(refused.value))
    assert load(file, *given, advice).config.reward.measured()[score] == 0.0
    below = f"[reward]\n{advice.removeprefix('reward.')}"
    for pasted in (f"{advice}\n{RUN_TOML}", f"{RUN_TOML}\n{below}\n"):
        file.write_text(pasted)
        assert score in load(file, given[1]).config.reward.measured()


def test_replicas_cannot_share_a_port_or_a_name(file: Path):
    with pytest.raises(ConfigError, match=r"rollout\.port \(8001\) must be 0"):
        load(file, "placement.rollout_replicas=2", "rollout.port=8001")
    with pytest.raises(ConfigError, match=r"rollout\.server_id \('a'\) must be unset"):
        load(file, "placement.rollout_replicas=2", "rollout.server_id=a")


def test_a_source_of_tasks_is_a_text_or_a_table(file: Path):
    data = """
[env]
max_tokens_per_turn = 64
[data]
train = ["a.jsonl", {source = "b.parquet", weight = 2}, "hf:owner/name:train"]
[evaluation.sets]
plain = "c.jsonl"
mapped = {source = "d.parquet", columns = {prompt = "question"}}
"""
    toml = RUN_TOML.partition("[data]")[0] + data
    config = load(
        write_scene(file.parent / "other", toml), "evaluation.sets.plain.max_items=3"
    ).config
    folder = file.parent / "other"
    assert config.data is not None
    assert [str(one) for one in config.data.train] == [
        str(folder / "a.jsonl"),
        str(folder / "b.parquet"),
        "hf:owner/name:train",
    ]
    assert [one.weight for one in config.data.train] == [1.0, 2.0, 1.0]
    plain, mapped = config.evaluation.sets["plain"], config.evaluation.sets["mapped"]
    assert (plain.source, plain.max_items) == (folder / "c.jsonl", 3)
    assert (mapped.source, mapped.columns) == (folder / "d.parquet", {"prompt": "question"})


def test_an_unknown_key_of_a_source_is_named(file: Path):
    with pytest.raises(ConfigError, match=r"data\.train\.0\.wieght"):
        load(file, 'data.train=[{source="a.jsonl", wieght=2}]')
    with pytest.raises(ConfigError, match=r"unknown key 'wieght' in table \[evaluation\.sets\.x\]"):
        load(file, "evaluation.sets.x.wieght=2")


# --- The system message from a file --------------------------------------------------------------


def test_the_system_message_may_be_in_a_file(file: Path, tmp_path: Path):
    (file.parent / "system.txt").write_text("Be brief.\nAnd kind.\n")
    toml = RUN_TOML.replace("[env]", '[env]\nsystem_prompt_file = "system.txt"')
    loaded = load(write_text(file, toml))
    assert loaded.config.env.system_prompt == "Be brief.\nAnd kind."
    assert "system.txt" in loaded.origin(("env", "system_prompt"))
    written = tmp_path / "config.json"
    write_config(loaded.config, written)
    (file.parent / "system.txt").unlink()  # a run keeps the text that it began with
    assert load(written).config.env.system_prompt == "Be brief.\nAnd kind."


def test_an_agent_brings_its_own_system_message(file: Path):
    assert load(file, "env.system_prompt=Be brief.").config.system_prompt == "Be brief."
    loaded = load(file, "env.system_prompt=Be brief.", 'agent.command=["true"]')
    assert loaded.config.system_prompt is None


def test_a_system_message_that_is_missing_or_given_twice_is_refused(file: Path):
    with pytest.raises(ConfigError, match=r"env\.system_prompt_file .*nowhere.* cannot be read"):
        load(file, "env.system_prompt_file=nowhere.txt")
    with pytest.raises(ConfigError, match="cannot be combined"):
        load(file, "env.system_prompt_file=nowhere.txt", "env.system_prompt=Be brief.")


@pytest.mark.parametrize("pattern", ["(", "(a)(b)"])
def test_a_pattern_that_cannot_find_an_answer_is_refused(file: Path, pattern: str):
    with pytest.raises(ConfigError, match=r"env\.answer_pattern"):
        load(file, f"env.answer_pattern='{pattern}'")


# --- Files that extend others --------------------------------------------------------------------


def write_text(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_a_file_may_extend_another(file: Path, tmp_path: Path):
    more = tmp_path / "more"
    more.mkdir()
    (more / "train.jsonl").write_text("")
    write_text(
        more / "small.toml",
        """
extends = "../example/run.toml"
[learner]
group_size = 6
[data]
train = ["train.jsonl"]
[tools.search]
top_k = 7
""",
    )
    mine = write_text(more / "mine.toml", 'extends = "small.toml"\n[learner]\nsteps = 5\n')
    loaded = load(mine, "learner.group_size=8")
    config = loaded.config
    # Each file over the one that it extends, and options over all of them.
    assert (config.learner.steps, config.learner.group_size) == (5, 8)
    assert (config.learner.groups_per_batch, search_of(config).top_k) == (2, 7)
    # A path is relative to the file that has it.
    assert search_of(config).corpus == file.parent / "corpus.jsonl"
    assert config.data is not None
    assert [one.source for one in config.data.train] == [more / "train.jsonl"]
    assert config.model.path == str(file.parent / "model")
    assert loaded.origin(("tools", "search", "top_k")).endswith("small.toml")


def test_what_an_agent_is_shown_is_relative_to_the_file(file: Path):
    write_text(file.parent / "programs", "")
    write_text(file, file.read_text() + '[agent]\ncommand = ["true"]\nshow = ["programs"]\n')
    agent = load(file).config.agent
    assert agent is not None
    assert agent.show == [file.parent / "programs"]
    assert agent.service_settings()["show"] == [str(file.parent / "programs")]


def test_files_that_extend_each_other_are_refused(tmp_path: Path):
    first = write_text(tmp_path / "a.toml", 'extends = "b.toml"\n')
    write_text(tmp_path / "b.toml", 'extends = "a.toml"\n')
    with pytest.raises(ConfigError, match=r"in a circle: .*a\.toml -> .*b\.toml -> .*a\.toml"):
        load(first)


def test_a_file_that_extends_nothing_there_is_explained(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no configuration file .*gone\.toml"):
        load(write_text(tmp_path / "a.toml", 'extends = "gone.toml"\n'))
    with pytest.raises(ConfigError, match="must name one file"):
        load(write_text(tmp_path / "b.toml", "extends = ['a.toml']\n"))


def test_a_file_of_a_later_version_is_refused_before_its_keys_are_read(file: Path):
    assert load(write_text(file, "config_version = 1\n" + RUN_TOML)).config.config_version == 2
    later = write_text(file, "config_version = 3\n" + RUN_TOML + "\n[new]\nkey = 1\n")
    with pytest.raises(ConfigError, match=r"config_version \(3, .*\) must be <= 2.*upgrade"):
        load(later)


# --- Names of other projects ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("learner.num_generations=8", True),
        ("actor_rollout_ref.rollout.n=8", True),
        ("learner.group_sizes=8", False),  # a slip of the pen
    ],
)
def test_what_resembles_no_name_of_ours_is_looked_for_elsewhere(
    file: Path, option: str, told: bool
):
    with pytest.raises(ConfigError) as caught:
        load(file, option)
    assert ("docs/names-elsewhere.md has those of TRL" in str(caught.value)) is told


def test_the_page_of_other_names_has_names_of_ours_that_exist():
    known = {".".join(key) for key in known_keys(Config)}
    page = (REPOSITORY / OTHER_NAMES).read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    tables = "run|model|data|env|reward|rollout|learner|engine|evaluation|placement"
    named = [key for row in rows for key in re.findall(rf"(?<![\w.])(?:{tables})\.\w+", row)]
    assert len(named) > 50
    assert [k for k in named if not any(o == k or o.startswith(f"{k}.") for o in known)] == []


def test_an_agent_must_end_before_the_learner_asks_again():
    values = {"model": {"path": "m"}, "agent": {"command": ["x"], "timeout_s": 90.0}}
    with pytest.raises(ConfigError, match=r"sample_timeout_s \(60\)"):
        load_config(None, environ={}, values={**values, "learner": {"sample_timeout_s": 60.0}})
    assert load_config(None, environ={}, values=values).config.agent is not None
