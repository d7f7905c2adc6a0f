"""`--decode` and its options, for `agent-r1 evaluate` and `agent-r1 chat`.

Every mistake is found here, before a service starts; rollout/decoding does the search.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from pydantic import ValidationError

from agent_r1.config.run import Config, ConfigError
from agent_r1.reward.components import ASKING
from agent_r1_proto.tasks import Decoding
from agent_r1_proto.tools import ToolSpec

BEAM_KEEPS = 2
"""Branches that `beam` keeps unless told otherwise."""


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
    given = {
        "candidates": arguments.decode_candidates,
        "keep": arguments.decode_keep,
        "lookahead": arguments.decode_lookahead,
        "max_calls": _number_or_name(arguments.decode_max_calls),
        "scorer": arguments.decode_scorer,
    }
    values = {name: value for name, value in given.items() if value is not None}
    if method is None:
        if values:
            raise ConfigError(f"--decode-{min(values).replace('_', '-')} needs --decode METHOD")
        return None
    if temperature == 0.0:
        raise ConfigError(
            f"--decode {method} chooses among samples, and at temperature 0 they are all the same; "
            "raise the temperature: --set evaluation.temperature=1, or chat's --temperature 1"
        )
    if method == "beam":
        values = {"keep": BEAM_KEEPS} | values
    if method != "majority":
        values["scorer"] = scorer_of(arguments.decode_scorer, config)
    try:
        return Decoding.model_validate({"method": method, **values})
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = f"--decode-{first['loc'][0]}: ".replace("_", "-") if first["loc"] else ""
        raise ConfigError(f"{where}{first['msg'].removeprefix('Value error, ')}") from exc


def _number_or_name(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def scorer_of(named: str | None, config: Config) -> str:
    """Return the component that scores branches: the named one, else the first that asks a model.

    Raises:
        ConfigError: reward.components has none that can.
    """
    can = config.reward.branch_scorers()
    found = named or next((name for name in can if name in ASKING), None)
    if found is None or found not in can:
        asked = (
            "no reward_model, critic or judge" if named is None else f"no {named!r} that can do it"
        )
        raise ConfigError(
            "decoding needs a component that scores branches without knowing the answer, and "
            f"reward.components has {asked}; add reward_model with the table [reward.model], or "
            f"name another one (--decode-scorer): {', '.join(can) or 'there is none'}"
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
