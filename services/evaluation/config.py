"""What an evaluation outside of training reads: `agent-r1 evaluate`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agent_r1_proto.config import ConfigTable


class QuestioningTable(ConfigTable):
    """How questions are asked; `agent_r1.config` fills it from `[evaluation]` and `[learner]`."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Sampling temperature; 0.0 is greedy."""
    max_turns: Annotated[int, Field(ge=1)] | None = None
    """Overrides `env.max_turns`; None leaves it."""
    max_questions: Annotated[int, Field(ge=1)] | None = None
    """Most questions asked of each set; None asks all of them."""
    max_in_flight: Annotated[int, Field(ge=1)] = 256
    """Most questions asked at one time."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts at one question before its failure is final."""
    sample_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A question without a result for this long is asked again, in seconds."""
    timeout_s: Annotated[float, Field(gt=0)] = 7200.0
    """Longest the whole evaluation may take, in seconds."""
