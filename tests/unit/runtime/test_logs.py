"""Log lines as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from agent_r1.runtime.logs import JsonFormatter, make_formatter


def line(message: object, *values: object, **record: Any) -> dict[str, Any]:
    made = logging.LogRecord("agent_r1.x", logging.INFO, "x.py", 1, message, values, None)
    vars(made).update(record)
    text = JsonFormatter("demo", "rollout").format(made)
    assert "\n" not in text
    return json.loads(text)


def test_keys_of_a_message_become_fields() -> None:
    found = line("weights pushed policy_version=%d write_s=%.3f url=%s", 7, 0.25, "http://a")
    assert found["message"] == "weights pushed"
    assert (found["policy_version"], found["write_s"], found["url"]) == (7, 0.25, "http://a")
    assert (found["run_id"], found["service"], found["level"]) == ("demo", "rollout", "INFO")
    assert found["logger"] == "agent_r1.x"


def test_an_attempt_is_named_by_group_and_sample() -> None:
    found = line("trajectory published rollout_id=%s num_turns=%d", "demo/2/17/3/1", 4)
    assert found["rollout_id"] == "demo/2/17/3/1"
    assert (found["group_id"], found["sample_index"], found["attempt"]) == (17, 3, 1)


def test_values_without_a_key_stay_in_the_text() -> None:
    found = line("step %d/%d reward=%.3f late=%.0f%% eta=%s", 3, 9, 0.5, 25.0, "4s")
    assert found["message"] == "step 3/9"
    assert (found["reward"], found["late"], found["eta"]) == (0.5, 25.0, "4s")


@pytest.mark.parametrize(
    ("message", "values"),
    [("all is well", ()), ("%s of %s", (1, 2)), ("100 %", ()), ({"a": 1}, ()), ("a=%s b", ())],
)
def test_other_messages_are_texts(message: object, values: tuple[object, ...]) -> None:
    expected = logging.LogRecord("x", 20, "x", 1, message, values, None).getMessage()
    assert line(message, *values)["message"] == expected


def test_a_traceback_is_a_field() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        found = line("it failed", exc_info=sys.exc_info())
    assert found["exception"].endswith("ValueError: why")


def test_text_is_what_it_was() -> None:
    made = logging.LogRecord("agent_r1.x", logging.INFO, "x.py", 1, "a b=%d", (1,), None)
    text = make_formatter("text", run_id="demo", service="rollout").format(made)
    assert text.endswith("INFO agent_r1.x a b=1")
