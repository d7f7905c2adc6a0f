"""`agent-r1 evaluate --decode value_guided --decode-fit T ...`: whether a scorer may lead a search.

Continues turns of development questions at each temperature, and lets evaluation/guidance.py
measure the scorer and fit the setting. Then the same questions are answered with that search,
greedily, and by votes. The best of these is written into the run folder, where `evaluate` and
`chat` find it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from agent_r1.cli.declare import refuse_beside
from agent_r1.cli.evaluation.asking import (
    Meter,
    ask_left,
    on_services,
    open_evaluation,
    questioning,
)
from agent_r1.cli.evaluation.decoding import (
    DECODING_FILE,
    SERVER_KEY,
    FittedSetting,
    check_tools,
    checked_decoding,
    given_options,
    place_in_run,
    scorer_of,
    with_scorers,
)
from agent_r1.cli.policy import config_file_of
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, ConfigError
from agent_r1.evaluation.answer_file import Key
from agent_r1.evaluation.guidance import Guidance, guidance
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED
from agent_r1.runtime.files.writing import write_atomically
from agent_r1_proto.tasks import Decoding

DEFAULTS: dict[str, Any] = {"candidates": 8, "lookahead": 0, "beta": 1.0, "continuations": 4}
"""Defaults of the options by which turns are proposed and continued while a scorer is measured."""
LEAST_VOTES = 2


@dataclass(frozen=True)
class Way:
    """A way to decode, and answers to the questions of a fit."""

    name: str
    decoding: Decoding | None
    """Search of the way; None: answers are taken greedily."""
    temperature: float
    answers: EvaluationRun

    def rewards(self) -> dict[Key, float]:
        """Return the reward of every answer that has one."""
        answers = self.answers.file.answers.values()
        return {answer.key: answer.reward for answer in answers if answer.reward is not None}

    def sampled_tokens(self) -> int:
        """Return what its answers cost together, in sampled tokens."""
        return sum(answer.sampled_tokens or 0 for answer in self.answers.file.answers.values())


class Fit:
    """Questions of `--decode-fit`, and the setting that their answers give."""

    def __init__(self, arguments: argparse.Namespace, config: Config) -> None:
        _refuse_unused(arguments, config)
        values = {"method": "value_guided", **DEFAULTS, **given_options(arguments)}
        if values["candidates"] < LEAST_VOTES:
            raise ConfigError(
                f"--decode-candidates ({values['candidates']}) must be {LEAST_VOTES} or more with "
                "--decode-fit, which compares the search with a vote of as many answers; raise it"
            )
        if values["beta"] != 0.0:
            values["scorer"] = scorer_of(arguments.decode_scorer, config)
        self.decoding = checked_decoding(values)
        scorer = self.decoding.scorer
        table = None if scorer is None else config.reward.servers.named().get(scorer)
        self._model = None if table is None or table.path is None else str(table.path)
        if scorer and self._model:  # values of other weights are not taken for those of these
            config = with_scorers(config, {scorer: self._model}, SERVER_KEY)
        self._overwrite = arguments.overwrite
        self._config, self._out = config, arguments.out.resolve()
        temperatures: list[float] = arguments.decode_fit
        self._measured = {t: self._evaluation(f"{t:g}", self.decoding, t) for t in temperatures}
        vote = Decoding(
            method="majority",
            candidates=self.decoding.candidates,
            max_calls=self.decoding.max_calls,
        )
        self._others = [self._way("greedy", "greedy answers", None, 0.0)]
        self._others += [
            self._way(f"majority-{t:g}", f"a vote at temperature {t:g}", vote, t)
            for t in temperatures
        ]

    def _evaluation(
        self, name: str, decoding: Decoding | None, temperature: float
    ) -> EvaluationRun:
        evaluation = self._config.evaluation.model_copy(update={"temperature": temperature})
        config = self._config.model_copy(update={"evaluation": evaluation})
        asked = questioning(config, "base_tool_call", 1, decoding)
        out = self._out.with_name(f"{self._out.stem}-{name}.jsonl")
        return open_evaluation(config, asked, out, overwrite=self._overwrite)

    def _way(self, file: str, name: str, decoding: Decoding | None, temperature: float) -> Way:
        return Way(name, decoding, temperature, self._evaluation(file, decoding, temperature))

    async def run(self, served: Config, meter: Meter) -> FittedSetting:
        """Ask services, and return the setting that is best."""
        found: list[Guidance] = []
        for temperature, evaluation in self._measured.items():
            await ask_left(evaluation, served, meter)
            answers = sorted(evaluation.file.answers.items())  # however they came
            places = [answer.place for _, answer in answers if answer.place is not None]
            found.append(guidance(places, temperature, self.decoding.candidates))
            meter.event(_shown(found[-1]))
        best = max(found, key=lambda one: (not one.why_not, one.gain[0]))
        ways, search = list(self._others), None
        if not best.why_not:
            search = self._way("search", "the search", self._guided(best), best.temperature)
            ways.append(search)
        for way in ways:
            await ask_left(way.answers, served, meter)
        means, shared = _mean_rewards(ways, self._config.learner.max_lost_share)
        # Of equals the cheapest is taken: a search that only does as well as greedy answers is not.
        taken = max(ways, key=lambda way: (means[way.name], -way.sampled_tokens()))
        compared = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        reason = f"mean reward on {shared} questions of the fit: {compared}"
        if best.why_not:
            reason = f"{best.why_not}; {reason}"
        elif taken is not search:
            reason = f"as a whole, {taken.name} did better, or as well for less; {reason}"
        return FittedSetting(
            decoding=taken.decoding,
            temperature=taken.temperature,
            component=self.decoding.scorer,
            model=self._model,
            policy=place_in_run(self._config.model.policy),
            reason=reason,
            measured=best,
        )

    def _guided(self, found: Guidance) -> Decoding:
        fitted = found.model_dump(include={"candidates", "beta", "branch_below", "answer_bias"})
        scorer = self.decoding.scorer if found.beta else None
        return self.decoding.model_copy(update={**fitted, "continuations": None, "scorer": scorer})


def _refuse_unused(arguments: argparse.Namespace, config: Config) -> None:
    """Refuse what a fit would not take into account."""
    if arguments.decode != "value_guided":
        raise ConfigError("--decode-fit fits the method value_guided; add --decode value_guided")
    temperature = config.evaluation.temperature
    refuse_beside(
        "--decode-fit",
        {
            f"--method {arguments.method}": arguments.method not in ("agent", "base_tool_call"),
            f"--attempts {arguments.attempts}": arguments.attempts != 1,
            f"evaluation.temperature = {temperature:g}": temperature != 0.0,
            "--decode-branch-below": arguments.decode_branch_below,
        },
    )


def _mean_rewards(ways: Sequence[Way], most_lost: float) -> tuple[dict[str, float], int]:
    """Return the mean reward of each way, over the questions that all of them answered.

    Args:
        ways: with their answers.
        most_lost: share of the questions that may be without.

    Returns:
        The means, and the number of these questions.

    Raises:
        ValueError: more are lost; nothing is decided.
    """
    rewards = {way.name: way.rewards() for way in ways}
    shared = set[Key].intersection(*map(set, rewards.values()))
    asked = len(ways[0].answers.questions)
    if not shared or len(shared) < (1 - most_lost) * asked:
        failures = [text for way in ways for text in way.answers.failures()]
        raise ValueError(
            f"{len(shared)} of {asked} questions were answered by all of {', '.join(rewards)}, and "
            f"learner.max_lost_share ({most_lost:g}) lets so few decide nothing; see why they "
            f"failed: {'; '.join(failures) or 'no failure is known'}"
        )
    return {name: fmean(of[key] for key in sorted(shared)) for name, of in rewards.items()}, len(
        shared
    )


def _shown(found: Guidance) -> str:
    mean, low, high = found.gain
    unled = f"; {found.why_unled}" if found.why_unled else ""
    measured = f"sigma {found.sigma:.3f}"
    if found.auc is not None:
        measured = (
            f"AUC {found.auc:.3f}, delta {found.delta:.3f}, {measured}, useful width "
            f"{found.useful_width:.3g}"
        )
    return (
        f"temperature {found.temperature:g}: {found.places} states, {measured}; best "
        f"with {found.candidates} candidates, beta {found.beta:g}, answer bias "
        f"{found.answer_bias:g}: a turn is worth {mean:+.3f} [{low:+.3f}, {high:+.3f}] more than "
        f"the greedy one{unled}"
    )


def fit(arguments: argparse.Namespace, config: Config) -> int:
    """Measure the scorer of a run's policy, and write how to decode into the run folder."""
    run = config_file_of(config.model.policy)
    if run is None:
        raise ConfigError("--decode-fit writes into a run folder; name one with --policy")
    wanted = Fit(arguments, config)
    check_tools(wanted.decoding, config_checks.check(config, "evaluate").specs)
    try:
        setting = on_services(config, wanted.run)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return EXIT_INTERRUPTED
    write_atomically(run.with_name(DECODING_FILE), setting.model_dump_json(indent=2) + "\n")
    print(setting.shown)
    print(f"setting: {run.with_name(DECODING_FILE)}; `--decode value_guided` takes it from now on")
    return 0
