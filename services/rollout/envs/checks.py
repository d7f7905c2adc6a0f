"""Checks of what a user's `ToolEnv.step` returned.

turns.py checks every step before it acts on it. What is wrong here is a mistake in the class,
so the texts name the class, what it returned, and what it must return.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from pydantic import JsonValue, TypeAdapter

from agent_r1.rollout.envs.base import EnvStep, ToolEnv
from agent_r1.runtime.user_code import kind_of
from agent_r1.runtime.user_code import short_repr as _shown
from agent_r1.text.tokens import MAX_DATA_DEPTH, nesting
from agent_r1_proto.parts import StoredImage, TextPart

_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


class WrongStepError(ValueError):
    """A step that cannot be used; the text says what the class must return."""


def check_step(env: ToolEnv, step: object, num_calls: int) -> EnvStep:
    """Return the step of one turn, if it can be used.

    Args:
        env: whose `step` it is.
        step: what that returned.
        num_calls: tool calls of the turn.

    Raises:
        WrongStepError: it cannot.
    """
    name = f"{type(env).__name__}.step"
    if not isinstance(step, EnvStep):
        raise WrongStepError(f"{name} returned {kind_of(step)}; it must return an EnvStep")
    _check_kinds(name, step)
    if len(step.process_rewards) not in (0, num_calls):
        raise WrongStepError(
            f"{name} returned {len(step.process_rewards)} process rewards for {num_calls} "
            "calls; return one per call, or none"
        )
    if not step.done:
        _check_reply(name, env, step, num_calls)
    return step


def _check_kinds(name: str, step: EnvStep) -> None:
    for field, fits, wanted in _KINDS:
        value = getattr(step, field)
        if not fits(value):
            raise WrongStepError(f"{name} returned {field} = {_shown(value)}; {wanted}")
    if (depth := nesting(step.data)) > MAX_DATA_DEPTH:
        raise WrongStepError(
            f"{name} returned data with {depth} lists and dicts within one another; at most "
            f"{MAX_DATA_DEPTH} can be read back: make it flatter, or return it as a text"
        )


def _check_reply(name: str, env: ToolEnv, step: EnvStep, num_calls: int) -> None:
    in_message = not step.observations and step.message is not None
    if len(step.observations) != num_calls and not in_message:
        raise WrongStepError(
            f"{name} returned {len(step.observations)} observations for {num_calls} calls; "
            "return one per call, or none and a message that shows the results"
        )
    if step.message is not None and not env.sends_messages:
        kind = type(env).__name__
        raise WrongStepError(f"{name} returned a message; set {kind}.sends_messages = True")
    if num_calls == 0 and step.message is None:
        raise WrongStepError(
            f"{name} returned nothing to continue with after a turn without calls; return "
            "done=True or a message"
        )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_observation(value: object) -> bool:
    if isinstance(value, str):
        return True
    return _is_list(value) and all(isinstance(p, TextPart | StoredImage) for p in value)  # pyright: ignore[reportGeneralTypeIssues]


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)  # which takes no number or truth value of numpy
        _JSON.validate_python(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_reward(value: object) -> bool:
    if value is None:
        return True
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "observations",
        lambda value: _is_list(value) and all(map(_is_observation, value)),
        "they must be a list of texts (or lists of parts), one per call",
    ),
    (
        "process_rewards",
        lambda value: _is_list(value) and all(map(_is_reward, value)),
        "they must be a list of finite numbers or None, one per call",
    ),
    ("turn_reward", _is_reward, "it must be a finite number or None"),
    ("state_key", lambda value: isinstance(value, str), "it must be a text"),
    (
        "message",
        lambda value: value is None or _is_observation(value),
        "it must be a text (or a list of parts) or None",
    ),
    (
        "data",
        _is_json,
        f"it must be JSON: None, numbers (of at most {sys.get_int_max_str_digits()} digits), "
        f"texts, lists and dicts of them, at most {MAX_DATA_DEPTH} within one another",
    ),
    ("reason", lambda value: isinstance(value, str), "it must be a text"),
    ("done", lambda value: isinstance(value, bool), "it must be True or False"),
)
"""Each field of a step, whether its value can be used, and what it must be."""
