"""`[reward]`: what a finished trajectory is worth, and how the reward service runs.

Read by `main.py` of the reward service; `agent_r1.config.run` joins it with the other tables.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent_r1.reward.components import BUILT_IN, ON_REQUEST
from agent_r1_service.config import ListenConfig

CLASS_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


class RewardConfig(ListenConfig):
    """`[reward]`: the rule, the components and their weights."""

    rule: Literal["weighted", "paper"] = "weighted"
    """`weighted`: sum of weight x component. `paper`: exact match if format is 1, else format - 1
    (Agent-R1, arXiv:2511.14460)."""
    components: dict[str, float] = {"exact_match": 1.0}
    """Weight of each component: built-in names, or `module:Name` of your own found through
    `run.plugins`. Weight 0.0 reports a component without counting it. Built-in components that
    are not named are reported too, with weight 0.0, where the task has what they need; math_equal,
    tests_passed and all_tests_passed only where they are named."""
    ranges: dict[str, tuple[float, float]] = {}
    """Lowest and highest value of components of yours; a value outside is an error."""
    component_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """A component of yours that takes longer has failed on this trajectory, in seconds."""
    max_concurrent: Annotated[int, Field(ge=1)] = 32
    """Trajectories scored at once."""

    @model_validator(mode="after")
    def _check_components(self) -> Self:
        built_in = (*BUILT_IN, *ON_REQUEST)
        for name in self.components:
            if name in built_in or re.match(CLASS_PATTERN, name):
                continue
            near = difflib.get_close_matches(name, built_in, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"reward.components has {name!r}, which is neither a built-in component nor a "
                f"module:Name; {hint}built-in are {', '.join(built_in)}"
            )
        for name, (low, high) in self.ranges.items():
            if name not in self.components or name in built_in:
                raise ValueError(
                    f"reward.ranges names {name!r}, which is not one of your own components in "
                    "reward.components; correct the name or remove it"
                )
            if low > high:
                raise ValueError(
                    f"reward.ranges of {name!r} is [{low:g}, {high:g}]; the first number must not "
                    "be the larger one"
                )
        if self.rule == "paper":
            weighted = sorted(name for name, weight in self.components.items() if weight != 0.0)
            if weighted not in ([], ["exact_match"]):
                raise ValueError(
                    f'reward.rule = "paper" has no weights, but components gives some to '
                    f"{', '.join(weighted)}; set those to 0.0 to report them only, or use "
                    'rule = "weighted"'
                )
        elif not any(self.components.values()):
            raise ValueError(
                f"reward.components ({self.components}) gives every trajectory reward 0; give one "
                "component a weight"
            )
        return self
