"""`--decode` and its options, for `agent-r1 evaluate` and `agent-r1 chat`.

Every mistake is found here, before a service starts; rollout/decoding does the search. With
`--decode value_guided` alone, setting and scorer are those that the run has fitted (fit.py).
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from agent_r1.cli.declare import integer, number
from agent_r1.cli.policy import config_file_of, policy_model
from agent_r1.config.run import Config, ConfigError
from agent_r1.evaluation.guidance import Guidance
from agent_r1.reward.components import ASKING
from agent_r1.reward.config import RewardConfig
from agent_r1_proto.messages import Message
from agent_r1_proto.tasks import Decoding, DecodingMethod
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.weights import SNAPSHOT_FILE

DECODING_FILE = "decoding.json"
"""File of the fitted setting, in a run folder."""
OPTIONS = (
    *("candidates", "keep", "lookahead", "beta", "branch_below", "answer_bias"),
    *("continuations", "max_calls", "scorer"),
)
"""The fields of `Decoding` that options give: `--decode-branch-below`."""
LEAST_PROBABILITY = 1e-6
"""Least value of `--decode-branch-below`; with 0, nothing would be searched."""
SERVER_KEY = "reward.servers.{}.path"
"""Key that names the folder of a scorer's model."""
BEAM_KEEPS = 4
"""Branches that `beam` keeps unless told otherwise. Two would never be drawn anew: their effective
number is at least 1."""


def add_decoding(command: argparse.ArgumentParser) -> None:
    """Let a command choose each answer among several branches."""
    add = command.add_argument_group("decoding").add_argument
    add(
        "--decode",
        choices=get_args(DecodingMethod),
        help="choose each answer among several branches. best_of_n: sample whole interactions and "
        "take the highest-scoring one. majority: take the most frequent answer. "
        "value_guided: after every turn, take the candidate that is likely and that the scorer "
        "values; alone, with the setting that was fitted for the run. beam: the same with several "
        "branches kept",
    )
    add(
        "--decode-candidates",
        type=integer(1),
        metavar="K",
        help="interactions, or turns sampled after every branch beside the greedy one (default: 4)",
    )
    add(
        "--decode-beta",
        type=number(0),
        metavar="B",
        help="weight of a value beside a log-probability in value_guided and beam (default: 1)",
    )
    add(
        "--decode-branch-below",
        type=number(LEAST_PROBABILITY, 1),
        metavar="P",
        help="sample candidates only where the greedy turn is less probable than this (default: "
        "everywhere)",
    )
    add(
        "--decode-answer-bias",
        type=number(-100, 100),
        metavar="X",
        help="add this to the log-probability of a turn that calls nothing; below 0, only answers "
        "are taken that are likely (default: 0)",
    )
    add("--decode-keep", type=integer(1), metavar="B", help="branches that beam keeps (default: 4)")
    add(
        "--decode-lookahead",
        type=integer(0),
        metavar="D",
        help="turns whose calls are run before a candidate is scored, its own included; with 0 "
        "only the calls of those kept are run (default: 1)",
    )
    add(
        "--decode-max-calls",
        metavar="N|NAME",
        help="most tool calls of all branches together: a number, or the name under which the "
        "task's payload has it",
    )
    add(
        "--decode-scorer",
        metavar="COMPONENT",
        help="component of reward.components that scores branches (default: the first of "
        "reward_model, critic and judge that is named)",
    )


def decoding_of(
    arguments: argparse.Namespace, config: Config, temperature: float
) -> Decoding | None:
    """Return what the options ask for; None without `--decode`.

    Args:
        arguments: of the command.
        config: of the services.
        temperature: at which the command samples.

    Raises:
        ConfigError: an option does not fit the method or the configuration.
    """
    method: str | None = arguments.decode
    values = given_options(arguments)
    if method is None:
        if values:
            raise ConfigError(f"{_option(min(values))} needs --decode METHOD")
        return None
    if temperature == 0.0:
        raise ConfigError(
            f"--decode {method} chooses among samples, and at temperature 0 they are all the same; "
            "raise the temperature: --set evaluation.temperature=1, or chat's --temperature 1"
        )
    if method == "beam":
        values = {"keep": BEAM_KEEPS} | values
    if method != "majority" and values.get("beta") != 0.0:
        values["scorer"] = scorer_of(arguments.decode_scorer, config)
    return checked_decoding({"method": method, **values})


def checked_decoding(values: Mapping[str, Any]) -> Decoding:
    """Return a way to decode, given its fields.

    Raises:
        ConfigError: they do not fit together; it names the option.
    """
    try:
        return Decoding.model_validate(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = f"{_option(str(first['loc'][0]))}: " if first["loc"] else ""
        raise ConfigError(f"{where}{first['msg'].removeprefix('Value error, ')}") from exc


def _option(name: str) -> str:
    """Return the option that gives a field of `Decoding`."""
    return f"--decode-{name.replace('_', '-')}"


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Decoding` that options give."""
    # Not every command has every option.
    given = {name: getattr(arguments, f"decode_{name}", None) for name in OPTIONS}
    calls = given["max_calls"]  # a number, or the name under which the task's payload has it
    given["max_calls"] = int(calls) if calls is not None and calls.isdecimal() else calls
    return {name: value for name, value in given.items() if value is not None}


class FittedSetting(Message):
    """Best decoding of a run's policy, found by `--decode-fit`."""

    decoding: Decoding | None
    """Search that was fitted; None: the answer is taken greedily."""
    temperature: float
    component: str | None
    """Component that scores branches."""
    model: str | None
    """Folder of the model that the component asks; None: the configuration says."""
    policy: str | None = None
    """Folder of the model that was asked, below the run folder; None in files of before."""
    reason: str
    """Ways to decode that were compared, and what speaks against a search; "" in files of before,
    where nothing does."""
    measured: Guidance
    """Figures of the scorer."""

    @property
    def shown(self) -> str:
        """Say what is done, and why."""
        if self.decoding is None:
            return f"decoding greedily: {self.reason}"
        options = self.decoding.model_dump(mode="json", exclude={"method"}, exclude_none=True)
        told = ", ".join(f"{name} {value}" for name, value in options.items())
        shown = f"decoding by {self.decoding.method}: {told}, temperature {self.temperature:g}"
        return f"{shown}; {self.reason}" if self.reason else shown

    def applied(self, config: Config) -> Config:
        """Return a configuration whose rewards ask the scorer, where one is needed.

        Raises:
            ConfigError: its weights are not there.
        """
        if self.decoding is None or self.decoding.scorer is None or self.model is None:
            return config
        if not (Path(self.model) / SNAPSHOT_FILE).is_file():
            raise ConfigError(
                f"this run was fitted with the scorer in {self.model}, which has no "
                f"{SNAPSHOT_FILE} any more; put it back, fit again with --decode-fit, or name an "
                "option such as --decode-beta, so that what was fitted is not used"
            )
        return with_scorers(config, {self.decoding.scorer: self.model}, SERVER_KEY)

    def instead_of(self, key: str, temperature: float) -> str:
        """Return `shown`, and what is not used of what the user said.

        Args:
            key: or option, that gives a temperature.
            temperature: which it gives; 0 is the default.
        """
        unused = f"; {key} ({temperature:g}) is not used"
        return self.shown + (unused if temperature not in (0.0, self.temperature) else "")


def fitted_setting(arguments: argparse.Namespace, policy: str) -> FittedSetting | None:
    """Return what was fitted for the run of a policy, where `--decode value_guided` says no more.

    Where it says more, or nothing was fitted, that is printed.

    Raises:
        ConfigError: the file cannot be read, or is of another checkpoint.
    """
    if arguments.decode != "value_guided":
        return None
    given, file = given_options(arguments), setting_file(policy)
    if not given:
        found = read_setting(policy)
        if found is None:
            print(
                f"no search was fitted for {policy}: the defaults of --decode value_guided count "
                "(`agent-r1 evaluate --decode-fit` fits one to development questions)"
            )
        return found
    if file is not None and file.is_file():
        print(f"{file} is not used, because {_option(min(given))} is given: nothing of it counts")
    return None


def setting_file(policy: str) -> Path | None:
    """Return where the fitted setting of a policy's run lies; None where it is of no run."""
    run = config_file_of(policy)
    return None if run is None else run.with_name(DECODING_FILE)


def place_in_run(policy: str) -> str:
    """Return the folder of a policy's model, as a path below its run folder."""
    run = config_file_of(policy)
    assert run is not None
    return os.path.relpath(policy_model(policy), run.parent)


def read_setting(policy: str) -> FittedSetting | None:
    """Return what was fitted for the run of a policy; None where nothing was.

    Raises:
        ConfigError: the file cannot be read, or is of another checkpoint.
    """
    file = setting_file(policy)
    if file is None or not file.is_file():
        return None
    try:
        found = FittedSetting.model_validate_json(file.read_bytes())
    except ValidationError as exc:
        raise ConfigError(f"{file} cannot be read ({exc}); fit it again with --decode-fit") from exc
    asked = place_in_run(policy)
    if found.policy not in (None, asked):
        raise ConfigError(
            f"{file} was fitted for {found.policy}, and the policy is {asked}; name that one, fit "
            "again with --decode-fit, or give options such as --decode-beta 0, so that what was "
            "fitted is not used"
        )
    return found


def scorer_of(named: str | None, config: Config) -> str:
    """Return the component that scores branches: the named one, else the first that asks a model.

    Raises:
        ConfigError: reward.components has none that can.
    """
    can = config.reward.branch_scorers()
    known = [name for name in can if ":" not in name]  # code of one's own may need the payload
    found = named or next((name for name in can if name in ASKING), None)
    if found is None or found not in can:
        asked = (
            "no reward_model, critic or judge" if named is None else f"no {named!r} that can do it"
        )
        raise ConfigError(
            "decoding needs a component that scores branches without knowing the answer, and "
            f"reward.components has {asked}; add reward_model with the table "
            "[reward.servers.reward_model], or name another one that needs no payload "
            "(--decode-scorer): "
            f"{', '.join(known) or 'there is none'}"
        )
    return found


def check_tools(decoding: Decoding | None, specs: Mapping[str, ToolSpec]) -> None:
    """Refuse tools whose calls cannot be given up with the branch that made them.

    Raises:
        ConfigError: there is one.
    """
    lasting = sorted(name for name, spec in specs.items() if spec.outside_effects)
    if decoding is not None and lasting:
        raise ConfigError(
            f"--decode {decoding.method} discards branches, but calls of {', '.join(lasting)} have "
            "effects outside their session (outside_effects), which cannot be undone; "
            "leave the tool out with env.enable_tools, or evaluate without --decode"
        )


def with_scorers(config: Config, folders: Mapping[str, str], key: str) -> Config:
    """Return the configuration with components that ask models of these folders.

    A model is called by its component and a digest of its weights, so that a cell which was made
    with another one is known.

    Args:
        config: of the services.
        folders: by component.
        key: that named a folder, with {} for the component.

    Raises:
        ConfigError: a folder has no weights.
    """
    if not folders:
        return config
    reward: dict[str, Any] = config.reward.model_dump()
    reward["components"] = {**dict.fromkeys(folders, 0.0), **config.reward.components}
    for name, folder in folders.items():
        weights = Path(folder) / SNAPSHOT_FILE
        if not weights.is_file():
            raise ConfigError(
                f"{key.format(name)} ({folder}) has no {SNAPSHOT_FILE}; name a folder that "
                "`agent-r1 export --critic` or `agent-r1 train-reward` wrote"
            )
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:12]
        reward["servers"][name] = {"path": folder, "model": f"{name}-{digest}"}
    return config.model_copy(update={"reward": RewardConfig.model_validate(reward)})
