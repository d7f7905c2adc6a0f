"""`examples/guided_search.sh`: what it asks of which questions, and what it compares in the end."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from agent_r1.config.run import load_config
from agent_r1.evaluation.experiments.config import MatrixFile

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# Where the search has to be better than every other way, and where it must not be worse.
BETTER = {"deep_world": ["compositions"], "lookahead": ["in_domain"]}
NOT_WORSE = {"deep_world": [], "lookahead": ["longer"]}
BEST_BASELINES = {"greedy", "majority_cool", "majority_warm"}
FAKE = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done >> calls
echo >> calls
if [ "$1 $3" = "train --run-dir" ]; then mkdir -p "$4/checkpoints/step_000040/model"; fi
"""


@pytest.fixture(params=sorted(BETTER))
def example(request: pytest.FixtureRequest) -> str:
    return request.param


def run_script(example: str, folder: Path) -> list[list[str]]:
    """Run the script with a program that does nothing, and return its calls."""
    (folder / "calls").unlink(missing_ok=True)
    subprocess.run(["sh", "examples/guided_search.sh", example], cwd=folder, check=True)
    calls = (folder / "calls").read_text().strip().split("\n\n")
    return [call.split("\n") for call in calls]


@pytest.fixture
def checkout(example: str, tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for name in ("agent-r1", "python"):
        program = tmp_path / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(FAKE)
        program.chmod(0o755)
    return tmp_path


def options_of(call: list[str]) -> list[str]:
    return [call[i + 1] for i, word in enumerate(call) if word == "--set"]


def read_matrix(file: Path) -> MatrixFile:
    return MatrixFile.model_validate(tomllib.loads(file.read_text()))


def test_the_search_has_to_beat_every_baseline_at_its_own_cost(example: str):
    folder = EXAMPLES / example
    matrix = read_matrix(folder / "decoding.toml")
    entries = {entry.label: entry for entry in matrix.decode}
    searches = [entry.label for entry in matrix.decode if entry.method == "fitted"]
    assert searches == ["guided"]
    goals = {(c.first, name): (c.second, c.goal) for c in matrix.comparisons for name in c.sets}
    for name in entries.keys() - searches:
        wanted = {(name, one): ("guided", "better") for one in BETTER[example]}
        wanted |= {(name, one): ("guided", "not_worse") for one in NOT_WORSE[example]}
        assert {key: goal for key, goal in goals.items() if key[0] == name} == wanted
        costs = entries[name].tokens_of or entries[name].calls_of
        assert costs == (None if name == "greedy" else "guided")
    script = (EXAMPLES / "guided_search.sh").read_text()
    for number, model in enumerate(matrix.models):
        for place in (model.policy, *model.scorers.values()):
            name = Path(place).name
            assert name.endswith(f"_seed{number}")
            assert f"$runs/{name.removesuffix(str(number))}$seed" in script


def test_elsewhere_the_same_agents_must_not_lose_to_the_best_baselines():
    matrix = read_matrix(EXAMPLES / "deep_world" / "decoding.toml")
    elsewhere = read_matrix(EXAMPLES / "deep_world" / "decoding_elsewhere.toml")
    assert [m.policy for m in elsewhere.models] == [m.policy for m in matrix.models]
    entries = {entry.label: entry for entry in matrix.decode}
    for entry in elsewhere.decode:
        assert entry == entries[entry.label]
    assert {entry.label for entry in elsewhere.decode} == {"guided", *BEST_BASELINES}
    run = tomllib.loads((EXAMPLES / "deep_world" / "run.toml").read_text())
    others = sorted(run["evaluation"]["sets"].keys() - {"compositions", "development"})
    goals = {c.first: (c.second, c.goal, sorted(c.sets)) for c in elsewhere.comparisons}
    assert goals == dict.fromkeys(BEST_BASELINES, ("guided", "not_worse", others))


def test_what_turns_are_worth_is_learned_and_fitted_on_no_reported_set(
    example: str, checkout: Path
):
    calls = [call for call in run_script(example, checkout) if not call[0].endswith(".py")]
    commands = ["train", "evaluate", "train-reward", "evaluate", "train-reward", "evaluate"]
    assert [call[0] for call in calls] == [*commands * 3, "matrix"]
    assert calls[-1] == ["matrix", f"examples/{example}/decoding.toml"]
    for seed in range(3):
        asked: list[tuple[list[str], int | None]] = []
        for call in calls[6 * seed : 6 * seed + 6]:
            if call[0] == "train":
                sets = load_config(checkout / call[1], options_of(call)).config.evaluation.sets
                assert list(sets) == ["development"]
            if call[0] == "evaluate":
                config = load_config(checkout / call[1], options_of(call)).config
                asked.append((list(config.evaluation.sets), config.evaluation.max_questions))
                assert call[call.index("--policy") + 1].endswith(f"ppo_seed{seed}")
        assert asked == [(["train"], 1000), (["train"], 500), (["development"], 400)]
