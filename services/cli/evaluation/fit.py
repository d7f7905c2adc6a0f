"""`agent-r1 evaluate --decode value_guided --decode-fit T ...`: whether a scorer may lead a search.

Continues turns of development questions at each temperature, lets evaluation/guidance.py measure
the scorer and fit the setting, and writes it into the run folder, where `evaluate` and `chat` find
it. Where no search pays, the better of greedy answers and a vote is written instead.
"""

from __future__ import annotations

import argparse
import sys
from statistics import fmean
from typing import Any

from agent_r1.cli.evaluation.asking import (
    Meter,
    ask_left,
    on_services,
    open_evaluation,
    questioning,
)
from agent_r1.cli.evaluation.decoding import (
    DECODING_FILE,
    FittedSetting,
    check_tools,
    checked_decoding,
    given_options,
    scorer_of,
    with_scorers,
)
from agent_r1.cli.policy import config_file_of
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, ConfigError
from agent_r1.evaluation.guidance import Guidance, guidance
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED
from agent_r1.runtime.files.writing import write_atomically
from agent_r1_proto.tasks import Decoding

DEFAULTS: dict[str, Any] = {"candidates": 8, "lookahead": 0, "beta": 1.0, "continuations": 4}
"""How turns are proposed and continued while a scorer is measured."""


class Fit:
    """Questions of `--decode-fit`, and the setting that their answers give."""

    def __init__(self, arguments: argparse.Namespace, config: Config) -> None:
        if arguments.decode != "value_guided":
            raise ConfigError(
                "--decode-fit fits the method value_guided; add --decode value_guided"
            )
        if arguments.attempts != 1:
            raise ConfigError(
                f"--attempts ({arguments.attempts}) is nothing that --decode-fit takes, which asks "
                "every question once; leave it out"
            )
        values = {"method": "value_guided", **DEFAULTS, **given_options(arguments)}
        if values["beta"] != 0.0:
            values["scorer"] = scorer_of(arguments.decode_scorer, config)
        self.decoding = checked_decoding(values)
        scorer = self.decoding.scorer
        table = None if scorer is None else config.reward.servers.named().get(scorer)
        self._model = None if table is None or table.path is None else str(table.path)
        if scorer and self._model:  # values of other weights are not taken for those of these
            config = with_scorers(config, {scorer: self._model})
        self._overwrite = arguments.overwrite
        self.temperatures: list[float] = arguments.decode_fit
        self._config, self._out = config, arguments.out.resolve()
        self._vote = Decoding(method="majority", candidates=self.decoding.candidates)
        self._measured = {
            t: self._evaluation(f"{t:g}", self.decoding, t) for t in self.temperatures
        }
        self._greedy = self._evaluation("greedy", None, 0.0)
        self._votes = {
            t: self._evaluation(f"majority-{t:g}", self._vote, t) for t in self.temperatures
        }

    def _evaluation(
        self, name: str, decoding: Decoding | None, temperature: float
    ) -> EvaluationRun:
        evaluation = self._config.evaluation.model_copy(update={"temperature": temperature})
        config = self._config.model_copy(update={"evaluation": evaluation})
        asked = questioning(config, "base_tool_call", 1, decoding)
        out = self._out.with_name(f"{self._out.stem}-{name}.jsonl")
        return open_evaluation(config, asked, out, overwrite=self._overwrite)

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
        if not best.why_not:
            return self._setting(best, self._guided(best), best.temperature)
        greedy = await self._mean_reward("greedy", self._greedy, served, meter)
        votes = {
            t: await self._mean_reward(f"a vote at temperature {t:g}", evaluation, served, meter)
            for t, evaluation in self._votes.items()
        }
        temperature = max(votes, key=votes.__getitem__)
        if votes[temperature] > greedy:
            return self._setting(best, self._vote, temperature)
        return self._setting(best, None, 0.0)

    async def _mean_reward(
        self, name: str, evaluation: EvaluationRun, served: Config, meter: Meter
    ) -> float:
        await ask_left(evaluation, served, meter)
        rewards = [a.reward for a in evaluation.file.answers.values() if a.reward is not None]
        mean = fmean(rewards or [0.0])
        meter.event(f"{name}: mean reward {mean:.3f}")
        return mean

    def _guided(self, found: Guidance) -> Decoding:
        fitted = found.model_dump(include={"candidates", "beta", "branch_below", "answer_bias"})
        scorer = self.decoding.scorer if found.beta else None
        return self.decoding.model_copy(update={**fitted, "continuations": None, "scorer": scorer})

    def _setting(
        self, found: Guidance, decoding: Decoding | None, temperature: float
    ) -> FittedSetting:
        return FittedSetting(
            decoding=decoding,
            temperature=temperature,
            component=self.decoding.scorer,
            model=self._model,
            reason=found.why_not,
            measured=found,
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
