"""The component `reported`: what a program that is started elsewhere gave its own work.

Such a program reports it to the service of `agent.attached`, as part of an `AgentEnd`, which comes
here as the data of the attempt's last turn.
"""

from __future__ import annotations

from agent_r1_proto.rewards import ScoreRequest


def reported(request: ScoreRequest) -> float:
    """Return the reward that was reported; 0.0 where the program failed or ran out of time.

    Raises:
        ValueError: the program ended well and reported none.
    """
    data = request.turns[-1].data
    end = data if isinstance(data, dict) else {}
    if isinstance(reward := end.get("reward"), int | float):
        return float(reward)
    if end.get("exit", "ok") != "ok":
        return 0.0
    raise ValueError(
        "no reward was reported; let the program that attaches report one (agent.attached), or "
        "leave the component out"
    )
