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
from agent_r1.cli.evaluation import chat as chatting
from agent_r1.cli.evaluation import fit as fitting
from agent_r1.cli.evaluation.decoding import BEAM_KEEPS, DECODING_FILE, read_setting
from agent_r1.config.run import Config
from agent_r1.evaluation.answer_file import Candidate, Place
from agent_r1.evaluation.guidance import Guidance
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.launch import local_client
from agent_r1.rollout.decoding.particles import RESAMPLE_BELOW
from agent_r1.runtime.evaluation_client import ATTEMPT
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
        self.searched = 0.75
        self.probes = True
        self.greedy: Callable[[str], float] | None = None
        self.fails: Callable[[str | None, str], bool] = lambda method, name: False
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
        if self.probes and asked.decoding is not None and asked.decoding.continuations:
            scored = asked.decoding.scorer is not None
            place = Place(
                turns=[],
                candidates=[
                    candidate(0.2 if scored else None, 0.0, greedy=True, calls=self.call_early),
                    candidate(value if scored else None, 1.0, greedy=False),
                ],
            )
        method = None if asked.decoding is None else asked.decoding.method
        em = {
            None: 0.5,  # greedily
            "majority": self.votes(asked.temperature),
            "value_guided": self.searched,
        }[method]
        for task in self.order(evaluation.left):
            attempt = int(str(task.metadata.get(ATTEMPT, 0)))
            line = answer(
                task.id,
                em,
                set="held_out",
                place=place,
                attempt=attempt,
                sampled_tokens={None: 10, "value_guided": 30, "majority": 80}[method],
            )
            if method is None and self.greedy is not None:
                line = answer(task.id, self.greedy(task.id), set="held_out")
            if place is None and self.fails(method, task.id):
                line = answer(task.id, None, set="held_out", failed=True, reward=None)
            evaluation.file.append(line)
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
    # Two temperatures, then greedy answers, two votes, and the search.
    assert [temperature for temperature, _ in services.asked] == [0.7, 1.0, 0.0, 0.7, 1.0, 1.0]
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
    assert (decoding.continuations, found.temperature) == (None, 1.0)
    assert found.reason == (
        "mean reward on 100 questions of the fit: greedy answers 0.500, a vote at temperature 0.7 "
        "0.250, a vote at temperature 1 0.250, the search 0.750"
    )
    assert services.asked[-1] == (1.0, decoding)
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


@pytest.mark.parametrize(
    ("searched", "votes", "taken"),
    [
        (0.5, 0.25, None),  # as good as greedy answers, which cost a third
        (0.49, 0.25, None),
        (0.6, 0.75, "majority"),
        (0.75, 0.75, "value_guided"),  # as good as a vote, which costs more
        (0.51, 0.5, "value_guided"),
    ],
)
def test_a_search_that_is_not_the_best_as_a_whole_gives_way(
    file: Path, services: Services, searched: float, votes: float, taken: str | None
):
    services.searched, services.votes = searched, lambda temperature: votes
    assert fit(file) == 0
    found = setting(file)
    assert found.measured.why_not == ""  # its turns are worth more
    assert (None if found.decoding is None else found.decoding.method) == taken
    gave_way = " did better, or as well for less; mean reward on 100" in found.reason
    assert gave_way == (taken != "value_guided")
    assert found.reason.endswith(f"the search {searched:.3f}")


def test_questions_that_some_way_did_not_answer_are_compared_in_none(
    file: Path, services: Services
):
    # The search answers only the first ones, on which greedy answers are all right.
    first = {f"q{i}" for i in range(95)}
    services.fails = lambda method, name: method == "value_guided" and name not in first
    services.greedy = lambda name: float(name in first)
    assert fit(file) == 0
    assert "mean reward on 95 questions of the fit: greedy answers 1.000" in setting(file).reason


def test_a_fit_of_which_too_many_questions_failed_decides_nothing(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    services.fails = lambda method, name: method == "value_guided" and int(name[1:]) > 5
    assert fit(file) == 2
    said = capsys.readouterr().err
    assert "6 of 100 questions were answered by all of greedy answers, a vote" in said
    assert "learner.max_lost_share (0.05)" in said
    assert read_setting(str(file.parent / "run")) is None


def test_where_no_turn_has_an_alternative_the_best_without_a_search_is_taken(
    file: Path, services: Services
):
    services.probes = False
    assert fit(file) == 0
    found = setting(file)
    assert (found.decoding, found.measured.places) == (None, 0)
    assert found.reason.startswith("0 states had several candidates, and 100 are needed; mean")


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
    assert (found.component, found.measured.auc) == (None, None)
    assert found.reason.endswith("the search 0.750")
    # Worth 0 and 1, one of each kind: nothing of a kind to compare.
    assert "100 states, sigma 0.000; best with 2 candidates" in capsys.readouterr().out


def test_a_scorer_that_does_not_lead_is_not_asked(file: Path, services: Services):
    services.call_early, services.sees = False, lambda temperature: 0.2
    assert fit(file) == 0
    decoding = setting(file).decoding
    assert (decoding.method, decoding.beta, decoding.scorer) == ("value_guided", 0.0, None)
    assert services.asked[-1][1] == decoding


def test_options_come_before_what_was_fitted(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    assert fit(file) == 0
    options = ("--decode", "value_guided", "--decode-beta", "0", "--decode-candidates", "3")
    assert cli.main(command(file, *options, "--set", "evaluation.temperature=0.5")) == 0
    decoding = services.asked[-1][1]
    assert decoding is not None
    assert (decoding.candidates, decoding.beta, decoding.scorer) == (3, 0.0, None)
    assert "decoding.json is not used, because --decode-beta is given" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attempts", "4"), "--attempts 4 does nothing with --decode-fit"),
        (("--method", "naive_rag"), "--method naive_rag does nothing with --decode-fit"),
        (
            ("--set", "evaluation.temperature=0.7"),
            "evaluation.temperature = 0.7 does nothing with --decode-fit",
        ),
        (("--decode-branch-below", "1"), "--decode-branch-below does nothing with --decode-fit"),
        (("--decode-keep", "2"), "decoding.keep (2) must be"),
        (("--decode-candidates", "1"), "--decode-candidates (1) must be 2 or more with"),
        (
            ("--set", 'reward.servers.reward_model.path="nowhere"'),
            "reward.servers.reward_model.path (",
        ),
    ],
)
def test_an_option_that_a_fit_does_not_take_is_refused(
    file: Path,
    services: Services,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
):
    assert fit(file, *options) == 2
    assert message in capsys.readouterr().err
    assert services.asked == []


def test_what_was_fitted_for_another_checkpoint_is_not_taken(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    assert fit(file) == 0
    assert setting(file).policy == "checkpoints/step_000001/model"
    run = file.parent / "run"
    shutil.copytree(run / "checkpoints" / "step_000001", run / "checkpoints" / "step_000002")
    services.asked.clear()
    assert cli.main(command(file, "--decode", "value_guided")) == 2
    said = "was fitted for checkpoints/step_000001/model, and the policy is checkpoints/step_000002"
    assert said in capsys.readouterr().err
    assert services.asked == []
    older = run / "checkpoints" / "step_000001" / "model"
    found = read_setting(str(older))
    assert found is not None
    # Files of before do not say which.
    unknown = found.model_copy(update={"policy": None})
    (run / DECODING_FILE).write_text(unknown.model_dump_json())
    assert read_setting(str(run)) == unknown


def test_without_a_fit_it_is_said_that_there_is_none(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    options = ("--decode", "value_guided", "--set", "evaluation.temperature=1")
    assert cli.main(command(file, *options)) == 2  # and no scorer either
    said = capsys.readouterr()
    assert "no search was fitted for" in said.out
    assert "--decode-fit" in said.out
    assert "reward.components has no reward_model" in said.err


def test_scorers_that_may_know_the_answer_are_not_suggested(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    options = ("--decode", "best_of_n", "--set", "evaluation.temperature=1")
    components = 'reward.components={exact_match = 1.0, "desk:brief" = 0.0, answered = 0.0}'
    assert cli.main(command(file, *options, "--set", components)) == 2
    assert capsys.readouterr().err.strip().endswith("(--decode-scorer): answered")


def test_attempts_beside_what_was_fitted_are_sampled_as_it_says(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    assert fit(file) == 0
    again = command(file, "--decode", "value_guided", "--attempts", "2")
    assert cli.main(again) == 0
    assert services.asked[-1] == (0.7, setting(file).decoding)
    services.searched = 0.0
    assert fit(file, "--overwrite") == 0
    assert setting(file).decoding is None
    capsys.readouterr()
    assert cli.main([*again, "--set", "evaluation.temperature=1", "--overwrite"]) == 2
    assert "leave --decode out, and add --set evaluation.temperature=1" in capsys.readouterr().err


def test_chat_takes_what_was_fitted(
    file: Path,
    services: Services,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    assert fit(file) == 0
    asked: list[tuple[float, Decoding | None]] = []

    async def converse(config: Config, console: Any, asks: Any, sampling: Any, by: Any) -> int:
        asked.append((sampling.temperature, by))
        return 0

    monkeypatch.setattr(chatting, "converse", converse)
    run = str(file.parent / "run")
    with_config = ("chat", run, "--config", str(file), "--question", "Where?")
    assert cli.main([*with_config, "--decode", "value_guided"]) == 0
    found = setting(file)
    assert asked == [(found.temperature, found.decoding)]
    reward = services.configs[-1].reward
    assert reward.servers.reward_model is not None
    assert reward.servers.reward_model.path == file.parent / "turn_values"
    assert "decoding by value_guided: candidates" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main([*with_config, "--decode", "value_guided", "--decode-continuations", "2"])
    assert "--decode-continuations" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--decode-continuations", "0"), "0 must be a whole number of 1 or more"),
        (("--decode-branch-below", "0"), "0 must be a number from 1e-06 to 1"),
    ],
)
def test_a_number_that_would_search_nothing_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
):
    with pytest.raises(SystemExit):
        cli.main(command(file, "--decode", "value_guided", *options))
    assert message in capsys.readouterr().err


def test_what_cannot_be_fitted_is_said(
    file: Path, services: Services, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(command(file, "--decode", "majority", "--decode-fit", "1.0")) == 2
    assert "add --decode value_guided" in capsys.readouterr().err
    (file.parent / "run" / DECODING_FILE).write_text("{}")
    assert cli.main(command(file, "--decode", "value_guided")) == 2
    assert "fit it again with --decode-fit" in capsys.readouterr().err
