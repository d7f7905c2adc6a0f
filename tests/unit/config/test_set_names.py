"""Names of evaluation sets."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agent_r1.learner.config import EvaluationConfig
from tests.support.builders import SEPARATORS


@pytest.mark.parametrize("name", ["", " ", "a\nb", *(f"a{one}b" for one in SEPARATORS)])
def test_a_set_whose_name_no_metric_can_have_is_refused(name: str):
    with pytest.raises(ValidationError, match="must be printable"):
        EvaluationConfig.model_validate({"sets": {name: "held_out.jsonl"}})


@pytest.mark.parametrize("name", ["held_out", "2wiki-dev", "质量 v1.1"])
def test_other_names_are_taken(name: str):
    assert list(EvaluationConfig.model_validate({"sets": {name: "held_out.jsonl"}}).sets) == [name]
