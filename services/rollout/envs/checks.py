"""Whether what a user's `ToolEnv.step` returned can be used.

turns.py checks every step before it acts on it. What is wrong here is a mistake in the class,
so the texts name the class, what it returned, and what it must return.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from numbers import Real

from pydantic import JsonValue, TypeAdapter

from agent_r1.rollout.envs.base import EnvStep
from agent_r1.rollout.envs.tool_env import ToolEnv
from agent_r1.runtime.user_code import kind_of
from agent_r1.runtime.user_code import short_repr as _shown
from agent_r1.text.trajectory_builder import MAX_DATA_DEPTH, nesting
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
    if not _is_list(step.observations) or not all(map(_is_observation, step.observations)):
        raise WrongStepError(
            f"{name} returned observations = {_shown(step.observations)}; they must be a list of "
            "texts (or lists of parts), one per call"
        )
    if not _is_list(step.process_rewards) or not all(map(_is_reward, step.process_rewards)):
        raise WrongStepError(
            f"{name} returned process_rewards = {_shown(step.process_rewards)}; they must be a "
            "list of finite numbers or None, one per call"
        )
    if step.turn_reward is not None and not _is_reward(step.turn_reward):
        raise WrongStepError(
            f"{name} returned turn_reward = {_shown(step.turn_reward)}; it must be a finite number "
            "or None"
        )
    if not isinstance(step.state_key, str):
        raise WrongStepError(
            f"{name} returned state_key = {_shown(step.state_key)}; it must be a text"
        )
    if step.message is not None and not _is_observation(step.message):
        raise WrongStepError(
            f"{name} returned message = {_shown(step.message)}; it must be a text (or a list of "
            "parts) or None"
        )
    if not _is_json(step.data):
        raise WrongStepError(
            f"{name} returned data = {_shown(step.data)}; it must be JSON: None, numbers (of at "
            f"most {sys.get_int_max_str_digits()} digits), texts, lists and dicts of them, at most "
            f"{MAX_DATA_DEPTH} within one another"
        )
    if (depth := nesting(step.data)) > MAX_DATA_DEPTH:
        raise WrongStepError(
            f"{name} returned data with {depth} lists and dicts within one another; at most "
            f"{MAX_DATA_DEPTH} can be read back: make it flatter, or return it as a text"
        )
    if not isinstance(step.reason, str):
        raise WrongStepError(f"{name} returned reason = {_shown(step.reason)}; it must be a text")
    if not isinstance(step.done, bool):
        raise WrongStepError(
            f"{name} returned done = {_shown(step.done)}; it must be True or False"
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
