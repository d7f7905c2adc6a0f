"""`agent-r1 matrix` around the services: what is planned, left out, kept and reported."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli import main as cli
from agent_r1.cli.evaluation.decoding import FittedSetting
from agent_r1.cli.evaluation.matrix_plan import MatrixPlan, PlannedCell, read_plan
from agent_r1.config.run import Config, ConfigError, read_written_config, write_config
from agent_r1.evaluation.answer_file import CallLine, TurnLine
from agent_r1.evaluation.experiments.config import METHODS
from agent_r1.evaluation.guidance import guidance
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.launch import local_client
from agent_r1.runtime.evaluation_client import ATTEMPT
from agent_r1_proto.tasks import Decoding
from tests.support.config_scene import RUN_TOML, load_nothing, write_scene
from tests.unit.evaluation.lines import answer

QUESTIONS = "".join(
    json.dumps({"_id": name, "question": f"Who is {name}?", "answer": "Ada"}) + "\n"
    for name in "abc"
)
PROBLEMS = json.dumps({"question": "One and one?", "answer": "#### 2"}) + "\n"
PROGRAM = {"text": "Return 1.", "task_id": 11, "test_list": ["assert one() == 1"]}
MATRIX_TOML = """
config = "run.toml"
results = "results/small"
methods = ["direct", "tools_multi_turn"]

[sets]
hotpotqa = "hotpot.jsonl"
gsm8k = "gsm8k.jsonl"
musique = "missing.jsonl"

[[models]]
name = "zero-shot"
policy = "model"

[[decode]]
method = "greedy"

[[decode]]
method = "majority"
candidates = 2
temperature = 0.7
"""
MODEL = '[[models]]\nname = "zero-shot"\npolicy = "model"'
CALL = CallLine(tool="search", status="ok")
Client = Callable[[Config], Coroutine[Any, Any, None]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_nothing(monkeypatch)
    folder = write_scene(tmp_path / "example").parent
    (folder / "hotpot.jsonl").write_text(QUESTIONS)
    (folder / "gsm8k.jsonl").write_text(PROBLEMS)
    (folder / "mbpp.jsonl").write_text(json.dumps(PROGRAM) + "\n")
    (folder / "matrix.toml").write_text(MATRIX_TOML)
    return folder


def plan_of(folder: Path, text: str = MATRIX_TOML, *options: str) -> MatrixPlan:
    file = folder / "matrix.toml"
    file.write_text(text)
    return read_plan(file, list(options), folder / "out")


def planned(plan: MatrixPlan) -> dict[str, PlannedCell]:
    return {cell.place.name: cell for cell in plan.runnable()}


def tasks_of(cell: PlannedCell) -> str:
    return cell.config.evaluation.sets[cell.place.set].source.read_text()


def missing(plan: MatrixPlan) -> dict[str, str]:
    return {place.name: why for place, why in plan.cells.items() if isinstance(why, str)}


# --- the plan -------------------------------------------------------------------------------------


def test_every_set_stands_in_the_plan_with_what_it_lacks(folder: Path):
    plan = plan_of(folder)
    assert len(plan.cells) == 7 * 1 * 2 * 2  # sets, models, methods, ways of decoding
    lacks = missing(plan)
    assert "math500 =" in lacks["math500-zero-shot-direct-greedy"]
    assert "hf:HuggingFaceH4/MATH-500:test" in lacks["math500-zero-shot-direct-greedy"]
    assert "missing.jsonl is missing" in lacks["musique-zero-shot-direct-greedy"]
    # The scene has the tool search alone.
    assert "[tools.python_exec]" in lacks["gsm8k-zero-shot-tools_multi_turn-greedy"]
    assert sorted({cell.place.set for cell in plan.runnable()}) == ["gsm8k", "hotpotqa"]


def test_cells_ask_as_their_method_and_decoding_say(folder: Path):
    cells = planned(plan_of(folder, MATRIX_TOML, "run.seed=5"))
    direct = cells["hotpotqa-zero-shot-direct-greedy"]
    assert direct.questioning.max_turns == 1
    assert (direct.questioning.temperature, direct.questioning.decoding) == (0.0, None)
    assert direct.questioning.seed == 5
    tools = cells["hotpotqa-zero-shot-tools_multi_turn-majority_2"]
    assert tools.questioning.max_turns is None
    assert tools.questioning.temperature == 0.7
    assert tools.questioning.decoding is not None
    assert (tools.questioning.decoding.method, tools.questioning.decoding.candidates) == (
        "majority",
        2,
    )
    tasks = [json.loads(line) for line in tasks_of(tools).splitlines()]
    assert [task["tools"] for task in tasks] == [["search"]] * 3
    assert [task["payload"] for task in tasks] == [{"answers": ["Ada"]}] * 3


def test_methods_that_can_share_services_do(folder: Path):
    text = MATRIX_TOML.replace('methods = ["direct", "tools_multi_turn"]', "")
    cells = planned(plan_of(folder, text))
    methods: dict[tuple[str, ...], set[str]] = {}
    for cell in cells.values():
        methods.setdefault(cell.services, set()).add(cell.place.method)
    assert methods == {
        ("zero-shot", "questions", "native"): set(METHODS) - {"react"},
        ("zero-shot", "questions", "react"): {"react"},
        ("zero-shot", "mathematics", "native"): {"direct", "chain_of_thought"},
    }
    # Whatever shares services was planned with the same ones.
    for cell in cells.values():
        alike = [other for other in cells.values() if other.services == cell.services]
        for other in alike:
            assert (other.config.env, other.config.tools) == (cell.config.env, cell.config.tools)
            assert other.config.reward == cell.config.reward


def test_services_are_set_up_for_the_family_and_the_style_of_calls(folder: Path):
    text = MATRIX_TOML.replace('"direct", "tools_multi_turn"', '"direct", "react"')
    text = text.replace("[sets]", '[sets]\nmbpp = "mbpp.jsonl"')
    (folder / "run.toml").write_text(f'{RUN_TOML}\n[tools.code_tests]\ntype = "code_tests"\n')
    cells = planned(plan_of(folder, text))
    program = cells["mbpp-zero-shot-direct-greedy"].config
    assert program.env.tool_format.endswith(":CodeBlockFormat")
    assert program.reward.components == {"all_tests_passed": 1.0, "tests_passed": 0.0}
    assert list(program.tools) == ["code_tests"]
    react = cells["hotpotqa-zero-shot-react-greedy"]
    assert react.config.env.tool_format.endswith(":ReactFormat")
    assert react.config.env.type.endswith(":TextEnv")
    assert react.config.reward.components == {"exact_match": 1.0, "f1": 0.0}
    assert "Its arguments: " in tasks_of(react)
    native = cells["gsm8k-zero-shot-direct-greedy"].config
    assert (native.env.type, native.env.tool_format) == ("tool", "hermes")
    assert native.reward.components == {"math_equal": 1.0}


def test_programs_have_no_majority(folder: Path):
    text = MATRIX_TOML.replace("[sets]", '[sets]\nmbpp = "mbpp.jsonl"')
    (folder / "run.toml").write_text(f'{RUN_TOML}\n[tools.code_tests]\ntype = "code_tests"\n')
    plan = plan_of(folder, text)
    assert "not equal as texts" in missing(plan)["mbpp-zero-shot-direct-majority_2"]
    assert "mbpp-zero-shot-direct-greedy" in planned(plan)


def test_settings_of_a_cell_name_no_place_of_this_machine(folder: Path):
    for cell in plan_of(folder).runnable():
        assert str(folder) not in json.dumps(dict(cell.settings))
        assert cell.settings["env.max_tokens_per_turn"] == 64


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hotpotqa =", "hotpot =", "hotpot"),
        ('"direct", ', '"straight", ', "straight"),
        ('policy = "model"', 'policy = "modle"', "modle"),
        (MODEL, f"{MODEL}\n\n{MODEL}", "models has 'zero-shot' twice"),
        ('method = "greedy"', 'method = "greedy"\ncandidates = 2', "candidates = 2, which belongs"),
        ('method = "majority"', 'method = "majority"\nlookahead = 2', "lookahead = 2, which belon"),
        ('method = "majority"', 'method = "best_of_n"', "no reward_model, critic or judge"),
        ('results = "results/small"', 'result = "results/small"', "result"),
    ],
)
def test_a_mistake_in_the_file_is_named(folder: Path, old: str, new: str, message: str):
    assert old in MATRIX_TOML
    with pytest.raises(ConfigError, match=message):
        plan_of(folder, MATRIX_TOML.replace(old, new))


# --- the command ----------------------------------------------------------------------------------


class StoppedError(Exception):
    """The user stops the command."""


class FakeServices:
    """Stands in for the launcher and the services: answers every question, or some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: list[Config] = []
        self.asked: list[str] = []
        self.stop_after = 999
        self.failing: set[str] = set()
        self.scores: Callable[[int], dict[str, float]] = lambda attempt: {}
        self.calls: Callable[[Decoding | None], int] = lambda decoding: 0
        monkeypatch.setattr(local_client, "run_client", self.run_client)
        monkeypatch.setattr(EvaluationRun, "ask", lambda evaluation, **_: self.ask(evaluation))

    def run_client(self, config: Config, client: Client, report: Callable[[str], None]) -> None:
        self.starts.append(config)
        try:
            asyncio.run(client(config))
        except StoppedError as exc:
            raise KeyboardInterrupt from exc

    def ask(self, evaluation: EvaluationRun) -> None:
        questioning = evaluation._questioning
        for task in evaluation.left:
            if len(self.asked) == self.stop_after:
                raise StoppedError
            self.asked.append(task.id)
            name = str(task.metadata["set"])
            attempt = int(str(task.metadata.get(ATTEMPT, 0)))
            components = {"exact_match": 1.0, "f1": 1.0, "math_equal": 1.0} | self.scores(attempt)
            failed = task.id in self.failing or f"{task.id}/{attempt}" in self.failing
            line = answer(
                task.id,
                set=name,
                attempt=attempt,
                components=components,
                sampled_tokens=7,
                seconds=0.5,
                failed=failed,
                turns=[TurnLine(text="", calls=[CALL] * self.calls(questioning.decoding))],
            )
            evaluation.file.append(line)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> FakeServices:
    return FakeServices(monkeypatch)


def run(folder: Path, *options: str) -> int:
    file = str(folder / "matrix.toml")
    return cli.main(["matrix", file, "--out", str(folder / "out"), *options])


def test_a_matrix_is_asked_reported_and_kept(
    folder: Path, services: FakeServices, capsys: pytest.CaptureFixture[str]
):
    assert run(folder) == 0
    text = (folder / "out" / "small.md").read_text()
    assert "| zero-shot | direct | greedy | 1.000 [1.000, 1.000] | 1.000" in text
    assert "no data: " in text
    assert (folder / "out" / "small.svg").exists()
    # HotpotQA: 2 methods x 2 decodings x 3 questions; GSM8K: 1 x 2 x 1.
    assert len(services.asked) == 14
    assert len(services.starts) == 2  # one for questions, one for mathematics
    cells = sorted(path.name for path in (folder / "out" / "small_cells").iterdir())
    assert len(cells) == 6
    assert "left out, no data: " in capsys.readouterr().out
    assert run(folder) == 0
    assert len(services.starts) == 2  # nothing is asked again
    assert "6 of 6 cells are finished" in capsys.readouterr().out


def test_cells_are_enough_to_go_on_elsewhere(folder: Path, services: FakeServices):
    assert run(folder) == 0
    for answers in (folder / "out" / "answers").iterdir():
        answers.unlink()
    assert run(folder) == 0
    assert len(services.starts) == 2


def test_an_interrupted_matrix_goes_on_where_it_stopped(
    folder: Path, services: FakeServices, capsys: pytest.CaptureFixture[str]
):
    services.stop_after = 4
    assert run(folder) == 130
    assert "cells and all answers are kept; continue with: agent-r1 matrix" in (
        capsys.readouterr().err
    )
    services.stop_after = 999
    assert run(folder) == 0
    assert len(services.asked) == 14  # no question twice


def test_other_settings_than_those_of_a_cell_are_refused_and_overwrite_discards_it(
    folder: Path, services: FakeServices, capsys: pytest.CaptureFixture[str]
):
    assert run(folder) == 0
    assert run(folder, "--set", "run.seed=3") == 2
    assert "seed is 0 there and 3 here" in capsys.readouterr().err
    assert run(folder, "--set", "run.seed=3", "--overwrite") == 0
    assert len(services.asked) == 28


def test_a_cell_that_lost_too_many_questions_is_not_finished(
    folder: Path, services: FakeServices, capsys: pytest.CaptureFixture[str]
):
    services.failing = {"a", "b"}
    assert run(folder) == 3
    assert "2 of 3 questions failed" in capsys.readouterr().out
    assert "## HotpotQA\n\nnot run." in (folder / "out" / "small.md").read_text()
    services.failing = set()
    assert run(folder) == 0
    # Only those that failed are asked again: 2 in each of HotpotQA's 4 cells.
    assert len(services.asked) == 14 + 8


# --- tasks of one's own, and a pool ---------------------------------------------------------------

OWN_TOML = """
config = "run.toml"
results = "results/own"
pool = 4

[tasks]
held_out = "held_out.jsonl"

[[models]]
name = "one"
policy = "model"
scorers = { critic = "critic" }

[[models]]
name = "two"
policy = "model"
scorers = { critic = "other_critic" }

[[decode]]
method = "greedy"

[[decode]]
method = "value_guided"
name = "guided"
candidates = 3
lookahead = 0

[[decode]]
method = "majority"
candidates = 3

[[decode]]
method = "best_of_n"
name = "best"
candidates = 2
scorer = "critic"
tokens_of = "guided"

[[comparisons]]
name = "primary"
first = "best"
second = "guided"
sets = ["held_out"]
goal = "better"
margin = 0.05
greedy_between = [0.3, 0.8]
"""


@pytest.fixture
def own(folder: Path) -> Path:
    lines = [{"id": name, "prompt": "?", "payload": {"answers": ["Ada"]}} for name in "ab"]
    for name in ("held_out", "other"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("critic", "other_critic"):
        (folder / name).mkdir()
        for file in ("config.json", "tokenizer.json"):
            (folder / name / file).write_text("{}")
        (folder / name / "model.safetensors").write_text(name)
    (folder / "matrix.toml").write_text(OWN_TOML)
    return folder


def test_tasks_are_asked_as_they_are_with_a_scorer_for_each_model(own: Path):
    plan = plan_of(own, OWN_TOML)
    cells = planned(plan)
    assert len(cells) == len(plan.cells) == 2 * 4
    guided = cells["held_out-one-as_they_are-guided"]
    assert guided.questioning.decoding is not None
    assert (guided.questioning.decoding.scorer, guided.pooled) == ("critic", False)
    tables = {
        name: cells[f"held_out-{name}-as_they_are-guided"].config.reward for name in ("one", "two")
    }
    named = {name: reward.servers.named()["critic"].model for name, reward in tables.items()}
    assert named["one"].startswith("critic-")
    assert named["one"] != named["two"]
    assert guided.settings["reward.critic.model"] == named["one"]
    assert tables["one"].components == {"exact_match": 1.0, "critic": 0.0}
    assert list(tables["one"].to_serve()) == ["critic"]


def test_services_can_read_the_configuration_of_a_cell(own: Path):
    (own / "run.toml").write_text(f'{RUN_TOML}\n[diagnose]\nsets = ["held_out"]\n')
    cells = planned(plan_of(own, OWN_TOML.replace("held_out", "other")))
    for cell in cells.values():
        write_config(cell.config, own / "config.json")
        assert list(read_written_config(own / "config.json").evaluation.sets) == ["other"]


def test_what_chooses_from_a_pool_shares_its_answers(own: Path):
    cells = planned(plan_of(own, OWN_TOML))
    majority, best = (cells[f"held_out-one-as_they_are-{n}"] for n in ("majority_3", "best"))
    assert majority.answers == best.answers != cells["held_out-two-as_they_are-best"].answers
    for cell in (majority, best):
        assert (cell.questioning.attempts, cell.questioning.decoding) == (4, None)
        assert cell.questioning.temperature == 1.0
        assert cell.questioning.greedy_first
    assert (majority.pooled, majority.entry.candidates, majority.scorer) == (True, 3, None)
    assert (best.pooled, best.scorer) == (True, "critic")
    assert best.costs_as == cells["held_out-one-as_they_are-guided"].file
    assert best.settings["pool.tokens_of"] == "held_out-one-as_they_are-guided"


def test_answers_of_another_temperature_are_another_pool(own: Path):
    text = OWN_TOML.replace("candidates = 2\n", "candidates = 2\ntemperature = 0.5\n")
    cells = planned(plan_of(own, text))
    majority, best = (cells[f"held_out-one-as_they_are-{n}"] for n in ("majority_3", "best"))
    assert majority.answers != best.answers
    assert (majority.questioning.temperature, best.questioning.temperature) == (1.0, 0.5)


def test_tasks_need_the_component_that_scores_them(own: Path, capsys: pytest.CaptureFixture[str]):
    assert run(own, "--set", "reward.components={answered = 1.0}") == 2
    assert "answered = 1.0, exact_match = 0.0 } (with --set" in capsys.readouterr().err


def test_the_pool_is_asked_once_and_the_comparison_reported(own: Path, services: FakeServices):
    # The critic likes the second answer best, which is wrong; guided asks one, with attempt 0.
    services.scores = lambda attempt: {"critic": -attempt % 3, "exact_match": float(attempt != 1)}
    assert run(own) == 0
    assert len(services.starts) == 2  # one for each model, with its own scorer
    # For each model 2 questions: greedy, guided, and 4 answers of the pool.
    assert len(services.asked) == 2 * 2 * (1 + 1 + 4)
    found = json.loads((own / "out" / "own.json").read_text())
    cells = {(c["model"], c["decode"]): c for c in found["cells"]}
    # An answer costs 7 tokens, guided as much as one; no fewer than 2 are chosen from.
    assert cells["one", "best"]["candidates"] == 2
    assert cells["one", "best"]["sampled_tokens"][0] == 14
    assert cells["one", "best"]["scores"] == {"a": 0.0, "b": 0.0}
    [primary] = found["comparisons"]
    assert primary["rows"][-1]["difference"] == [1.0, 1.0, 1.0]
    assert primary["reached"]
    text = (own / "out" / "own.md").read_text()
    assert "1.000 (outside 0.3 to 0.8)" in text
    assert "This is so." in text
    assert (own / "out" / "own_curves.svg").exists()
    assert run(own) == 0
    assert len(services.starts) == 2


def test_a_question_is_lost_where_an_answer_that_is_chosen_from_failed(
    own: Path, services: FakeServices, capsys: pytest.CaptureFixture[str]
):
    services.failing = {"a/2"}  # the third answer, which majority_3 needs and best does not
    services.scores = lambda attempt: {"critic": 0.0}
    assert run(own) == 3
    said = capsys.readouterr().out
    assert "one-as_they_are-majority_3: 1 of 2 questions failed" in said
    found = json.loads((own / "out" / "own.json").read_text())
    cells = {(c["model"], c["decode"]): c for c in found["cells"]}
    assert cells["one", "majority_3"]["missing"] == "not run"
    assert (cells["one", "best"]["n"], cells["one", "best"]["failed"]) == (2, 0)


def test_a_cost_that_is_not_known_yet_leaves_its_cell_for_later(
    own: Path, services: FakeServices, capsys: pytest.CaptureFixture[str]
):
    services.failing = {"a/0"}  # what the search got, and the first answer of the pool
    services.scores = lambda attempt: {"critic": 0.0}
    assert run(own) == 3
    said = capsys.readouterr().out
    assert "one-as_they_are-best: not measured, since its cost is that of a cell" in said
    assert "Not run: one: best, one: guided" in (own / "out" / "own.md").read_text()
    services.failing = set()
    assert run(own) == 0
    assert "Not run" not in (own / "out" / "own.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pool = 4", "pool = 2", "chooses from 3 answers, and the pool has 2"),
        ("pool = 4", "", "tokens_of = 'guided'; it needs pool"),
        ('tokens_of = "guided"', 'tokens_of = "best"', "names an entry that samples its own"),
        ('tokens_of = "guided"', 'tokens_of = "guided"\ncalls_of = "guided"', "keep one of them"),
        ('tokens_of = "guided"', "max_calls = 2", "has max_calls"),
        ('second = "guided"', 'second = "guide"', "names 'guide', which is none of greedy, guided"),
        ('sets = ["held_out"]', 'sets = ["held"]', "names 'held', which is none of held_out"),
        ("held_out =", "gsm8k =", "the name of a public data set"),
        ('critic = "critic"', 'critic = "results"', "has no model.safetensors"),
        ('critic = "critic"', 'judge = "critic"', "judge"),
    ],
)
def test_a_mistake_about_tasks_or_the_pool_is_named(own: Path, old: str, new: str, message: str):
    assert old in OWN_TOML
    with pytest.raises(ConfigError, match=message):
        plan_of(own, OWN_TOML.replace(old, new))


# --- what was fitted, equal calls, and cells without their model ----------------------------------

FITTED_TOML = """
config = "run.toml"
results = "results/own"
pool = 4

[tasks]
held_out = "held_out.jsonl"

[[models]]
name = "trained"
policy = "run"
scorers = { critic = "critic" }

[[decode]]
method = "greedy"

[[decode]]
method = "fitted"
name = "guided"

[[decode]]
method = "majority"
name = "vote"
candidates = 2
calls_of = "guided"
"""


@pytest.fixture
def fitted(own: Path) -> Path:
    run = own / "run"
    shutil.copytree(own / "model", run / "checkpoints" / "step_000001" / "model")
    (run / "config.json").write_text(json.dumps({"run": {}, "model": {}, "learner": {}}))
    (own / "matrix.toml").write_text(FITTED_TOML)
    write_setting(own, Decoding(method="value_guided", candidates=3, beta=2.0, scorer="critic"))
    return own


def write_setting(own: Path, decoding: Decoding | None) -> None:
    setting = FittedSetting(
        decoding=decoding,
        temperature=0.0 if decoding is None else 0.5,
        component="critic",
        model=str(own / "critic"),
        reason="",
        measured=guidance([], 0.5, 4),
    )
    (own / "run" / "decoding.json").write_text(setting.model_dump_json())


def test_what_was_fitted_for_a_models_run_is_asked_for(fitted: Path):
    guided = planned(plan_of(fitted, FITTED_TOML))["held_out-trained-as_they_are-guided"]
    assert guided.questioning.decoding is not None
    assert (guided.questioning.decoding.beta, guided.questioning.temperature) == (2.0, 0.5)
    assert guided.settings["decoding.candidates"] == 3
    write_setting(fitted, None)
    greedily = planned(plan_of(fitted, FITTED_TOML))["held_out-trained-as_they_are-guided"]
    assert (greedily.questioning.decoding, greedily.questioning.temperature) == (None, 0.0)


def test_what_was_not_fitted_or_lacks_its_scorer_is_named(fitted: Path):
    without = FITTED_TOML.replace('scorers = { critic = "critic" }', "")
    with pytest.raises(ConfigError, match="has no such scorer; add it to its scorers: critic = "):
        plan_of(fitted, without)
    (fitted / "run" / "decoding.json").unlink()
    with pytest.raises(ConfigError, match="nothing was fitted for run; fit it with `agent-r1"):
        plan_of(fitted, FITTED_TOML)


def test_as_many_answers_are_chosen_from_as_make_the_calls_of_a_search(
    fitted: Path, services: FakeServices
):
    # An answer makes one call, and the search three: of the pool's four, three answers make as
    # many. By tokens, of which each takes seven, two would do.
    services.calls = lambda decoding: 1 if decoding is None else 3
    services.scores = lambda attempt: {"critic": 0.0}
    assert run(fitted) == 0
    found = json.loads((fitted / "out" / "own.json").read_text())
    cells = {cell["decode"]: cell for cell in found["cells"]}
    assert (cells["guided"]["calls"][0], cells["vote"]["calls"][0]) == (3.0, 3.0)
    assert cells["vote"]["candidates"] == 3
    assert cells["vote"]["settings"]["pool.calls_of"] == "held_out-trained-as_they_are-guided"


def test_finished_cells_are_reported_where_their_model_is_not(
    fitted: Path, services: FakeServices, capsys: pytest.CaptureFixture[str]
):
    services.scores = lambda attempt: {"critic": 0.0}
    assert run(fitted) == 0
    written = (fitted / "out" / "own.json").read_text()
    shutil.rmtree(fitted / "run")
    (fitted / "critic" / "model.safetensors").unlink()
    (fitted / "held_out.jsonl").unlink()
    capsys.readouterr()
    assert run(fitted) == 0
    said = capsys.readouterr().out
    assert "the model trained is not here" in said
    assert "3 of 3 cells are finished" in said
    assert json.loads((fitted / "out" / "own.json").read_text()) == json.loads(written)
    assert len(services.starts) == 1
    assert run(fitted, "--overwrite") == 2
    assert "MODEL_OR_RUN" in capsys.readouterr().err
    (fitted / "out" / "own_cells" / "held_out-trained-as_they_are-vote.json").unlink()
    assert run(fitted) == 2
    assert "MODEL_OR_RUN" in capsys.readouterr().err
