"""`evaluate --decode-fit`, and who takes what it wrote; services stand in, figures are by hand."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli import main as cli
from agent_r1.cli.evaluation import fit as fitting
from agent_r1.cli.evaluation.decoding import BEAM_KEEPS, DECODING_FILE, read_setting
from agent_r1.config.run import Config
from agent_r1.evaluation.answer_file import Candidate, Place
from agent_r1.evaluation.guidance import Guidance
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.launch import local_client
from agent_r1.rollout.decoding.particles import RESAMPLE_BELOW
from agent_r1_proto.rewards import ScoreTurn
from agent_r1_proto.tasks import Decoding
from tests.support.config_scene import load_nothing, task_line, write_scene
from tests.unit.evaluation.lines import answer

Client = Callable[[Config], Coroutine[Any, Any, Any]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    load_nothing(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = write_scene(tmp_path / "example")
    (path.parent / "held_out.jsonl").write_text("".join(task_line(f"q{i}") for i in range(100)))
    model = path.parent / "model"
    run = path.parent / "run"
    shutil.copytree(model, run / "checkpoints" / "step_000001" / "model")
    (run / "config.json").write_text(json.dumps({"run": {}, "model": {}, "learner": {}}))
    scorer = path.parent / "turn_values"
    shutil.copytree(model, scorer)
    (scorer / "model.safetensors").write_bytes(b"weights")
    return path


def candidate(value: float | None, worth: float, *, greedy: bool, calls: bool = True) -> Candidate:
    return Candidate(
        turn=ScoreTurn(text="t"),
        calls=calls,
        sample=None if greedy else 0,
        greedy=greedy,
        logprob=math.log(0.6 if greedy else 0.2),
        value=value,
        outcomes=[worth, worth],
    )


class Services:
    """Answers every question: the scorer sees what turns are worth, as far as `sees` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[float, Decoding | None]] = []
        self.configs: list[Config] = []
        self.sees: Callable[[float], float] = lambda temperature: 0.8
        self.votes: Callable[[float], float] = lambda temperature: 0.25
        self.call_early = True
        self.order: Callable[[Any], Iterable[Any]] = iter
        monkeypatch.setattr(local_client, "run_client", self.run_client)
        monkeypatch.setattr(EvaluationRun, "ask", lambda evaluation, **_: self.ask(evaluation))

    def run_client(self, config: Config, client: Client, report: Callable[[str], None]) -> Any:
        self.configs.append(config)
        return asyncio.run(client(config))

    def ask(self, evaluation: EvaluationRun) -> None:
        asked = evaluation._questioning
        self.asked.append((asked.temperature, asked.decoding))
        value, place = self.sees(asked.temperature), None
        if asked.decoding is not None and asked.decoding.continuations:
            scored = asked.decoding.scorer is not None
            place = Place(
                turns=[],
                candidates=[
                    candidate(0.2 if scored else None, 0.0, greedy=True, calls=self.call_early),
                    candidate(value if scored else None, 1.0, greedy=False),
                ],
            )
        votes = asked.decoding is not None and asked.decoding.method == "majority"
        em = self.votes(asked.temperature) if votes else 0.5
        for task in self.order(evaluation.left):
            evaluation.file.append(answer(task.id, em, set="held_out", place=place))
            if place is not None:  # as many turns before it as the number of its question
                place = place.model_copy(update={"turns": [*place.turns, ScoreTurn(text="t")]})


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Services:
    return Services(monkeypatch)


def command(file: Path, *more: str) -> list[str]:
    run, out = file.parent / "run", file.parent / "scores.jsonl"
    return ["evaluate", str(file), "--policy", str(run), "--out", str(out), *more]


def fit(file: Path, *more: str) -> int:
    scorer = file.parent / "turn_values"
    return cli.main(
        command(
            file,
            *("--decode", "value_guided", "--decode-fit", "0.7", "1.0"),
            *("--set", "reward.components={exact_match = 1.0, reward_model = 0.0}"),
            *("--set", f'reward.servers.reward_model={{path = "{scorer}", model = "turn-values"}}'),
            *more,
        )
    )


def setting(file: Path) -> Any:
    found = read_setting(str(file.parent / "run"))
    assert found is not None
    return found


def test_the_better_temperature_is_fitted_written_and_taken(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    # At 0.7 the scorer ranks the two turns the wrong way round.
    services.sees = lambda temperature: 0.8 if temperature == 1.0 else 0.1
    assert fit(file) == 0
    assert [temperature for temperature, _ in services.asked] == [0.7, 1.0]
    probing = services.asked[0][1]
    assert probing is not None
    assert (probing.candidates, probing.continuations, probing.lookahead) == (8, 4, 0)
    found = setting(file)
    # log 3 = 1.0986 is to be made up by a value that is 0.6 higher: from beta = 1.83 on.
    decoding = found.decoding
    assert (decoding.method, decoding.beta, decoding.scorer) == (
        "value_guided",
        2.0,
        "reward_model",
    )
    assert (decoding.continuations, found.temperature, found.reason) == (None, 1.0, "")
    assert (found.measured.auc, found.measured.places) == (1.0, 100)
    assert "AUC 0.000" in capsys.readouterr().out

    # Without further options, evaluate asks with it, and with its scorer.
    assert cli.main(command(file, "--decode", "value_guided")) == 0
    assert services.asked[-1] == (1.0, decoding)
    reward = services.configs[-1].reward
    assert reward.components["reward_model"] == 0.0
    assert reward.servers.reward_model is not None
    assert reward.servers.reward_model.path == file.parent / "turn_values"
    assert "decoding by value_guided: candidates" in capsys.readouterr().out


@pytest.mark.parametrize(("votes", "method"), [(0.25, None), (0.75, "majority")])
def test_a_scorer_that_knows_nothing_gives_way_to_greedy_answers_or_a_vote(
    file: Path,
    services: Services,
    capsys: pytest.CaptureFixture[str],
    votes: float,
    method: str | None,
):
    services.sees = lambda temperature: 0.2
    services.votes = lambda temperature: votes if temperature == 1.0 else 0.0
    assert fit(file) == 0
    asked = [None if decoding is None else decoding.method for _, decoding in services.asked]
    assert asked == ["value_guided", "value_guided", None, "majority", "majority"]
    found = setting(file)
    assert (None if found.decoding is None else found.decoding.method) == method
    assert found.temperature == (0.0 if method is None else 1.0)
    assert "50% of the pairs" in found.reason
    assert found.reason in capsys.readouterr().out
    assert cli.main(command(file, "--decode", "value_guided")) == 0
    assert services.asked[-1][1] == found.decoding


def test_without_a_scorer_patience_is_fitted(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    services.call_early = False  # the greedy turn answers, and a call would be worth more
    options = ("--decode", "value_guided", "--decode-fit", "1.0", "--decode-beta", "0")
    assert cli.main(command(file, *options)) == 0
    assert services.asked[0][1] == Decoding(
        method="value_guided", candidates=8, lookahead=0, beta=0.0, continuations=4
    )
    found = setting(file)
    # log 3 = 1.0986 is to be made up by a bias against answers: -1.5 is the first of the grid.
    assert (found.decoding.answer_bias, found.decoding.beta, found.decoding.scorer) == (
        -1.5,
        0.0,
        None,
    )
    assert (found.component, found.measured.auc, found.reason) == (None, None, "")
    # Worth 0 and 1, one of each kind: nothing of a kind to compare.
    assert "100 states, sigma 0.000; best with 2 candidates" in capsys.readouterr().out


def test_options_come_before_what_was_fitted(file: Path, services: Services):
    assert fit(file) == 0
    options = ("--decode", "value_guided", "--decode-beta", "0", "--decode-candidates", "3")
    assert cli.main(command(file, *options, "--set", "evaluation.temperature=0.5")) == 0
    decoding = services.asked[-1][1]
    assert decoding is not None
    assert (decoding.candidates, decoding.beta, decoding.scorer) == (3, 0.0, None)


def test_what_was_fitted_says_what_it_replaces_and_what_it_lacks(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    assert fit(file) == 0
    warm = command(file, "--decode", "value_guided", "--set", "evaluation.temperature=0.5")
    assert cli.main(warm) == 0
    assert services.asked[-1][0] == setting(file).temperature
    assert "; evaluation.temperature (0.5) is not used" in capsys.readouterr().out
    (file.parent / "turn_values" / "model.safetensors").unlink()
    assert cli.main(command(file, "--decode", "value_guided")) == 2
    assert "has no model.safetensors any more" in capsys.readouterr().err


def test_what_is_fitted_does_not_depend_on_the_order_of_answers(
    file: Path, services: Services, monkeypatch: pytest.MonkeyPatch
):
    met: list[list[int]] = []

    def guidance(places: Sequence[Place], *more: Any) -> Guidance:
        met.append([len(place.turns) for place in places])
        return real(places, *more)

    real = fitting.guidance
    monkeypatch.setattr(fitting, "guidance", guidance)
    services.order = lambda left: sorted(left, key=lambda task: task.id, reverse=True)
    assert fit(file) == 0
    assert met == [list(range(99, -1, -1))] * 2  # from the first id to the last


def test_a_beam_keeps_as_many_as_it_can_draw_anew():
    assert RESAMPLE_BELOW * BEAM_KEEPS > 1.0


def test_a_fit_goes_on_where_it_stopped(file: Path, services: Services):
    assert fit(file) == 0
    (file.parent / "run" / DECODING_FILE).unlink()
    services.asked.clear()
    assert fit(file) == 0
    assert services.asked == []
    assert setting(file).decoding.beta == 2.0


def test_what_cannot_be_fitted_is_said(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(command(file, "--decode", "majority", "--decode-fit", "1.0")) == 2
    assert "add --decode value_guided" in capsys.readouterr().err
    assert fit(file, "--attempts", "4") == 2
    assert "asks every question once" in capsys.readouterr().err
    assert fit(file, "--decode-branch-below", "1", "--decode-keep", "2") == 2
    assert "decoding.keep (2) must be" in capsys.readouterr().err
    (file.parent / "run" / DECODING_FILE).write_text("{}")
    assert cli.main(command(file, "--decode", "value_guided")) == 2
    assert "fit it again with --decode-fit" in capsys.readouterr().err
