"""Memory that a run's messages can take in Redis, compared with what a server has.

`agent-r1 check` asks before a run starts, the learner again with the limit of the server it
has connected to. Samples and questions of evaluations are in flight at the same time.
"""

from __future__ import annotations

from agent_r1.learner.config import EvaluationConfig, LearnerConfig
from agent_r1.runtime.memory import MIB

MAX_QUESTIONS_IN_FLIGHT = 512
"""Most questions of an evaluation in the streams at one time, which bounds their memory."""
SERVER_MAXMEMORY = "maxmemory of the Redis at redis.url"
"""Name, in messages, of the limit of a server that runs already."""
BYTES_PER_TOKEN = 20
"""Most that one token of four bytes of text takes in an entry: 8 bytes of arrays with its mask bit,
and its text three times, as of an answer: in the turn, in what it says beside thoughts, and as its
answer."""
BYTES_PER_ENTRY = 16_384
"""Worst case of everything in an entry that does not grow with its tokens."""


def worst_case_redis_bytes(
    learner: LearnerConfig, evaluation: EvaluationConfig, max_context: int, max_segments: int = 1
) -> int:
    """Return the most memory, in bytes, that a training run's messages can take in Redis.

    Args:
        learner: how many samples are asked for ahead.
        evaluation: its sets are asked meanwhile.
        max_context: most tokens of one segment.
        max_segments: most segments of one trajectory.
    """
    samples = (learner.max_staleness + 1) * learner.groups_per_batch * learner.slots_per_group
    questions = MAX_QUESTIONS_IN_FLIGHT if evaluation.sets else 0
    return (samples + questions) * (BYTES_PER_ENTRY + max_segments * max_context * BYTES_PER_TOKEN)


def redis_memory_problem(
    learner: LearnerConfig,
    evaluation: EvaluationConfig,
    max_context: int,
    max_segments: int = 1,
    *,
    limit_bytes: int,
    limit_name: str,
) -> str | None:
    """Say why a memory limit of Redis is too low for the run; None when it is not.

    Args:
        learner: how many samples are asked for ahead.
        evaluation: its sets are asked meanwhile.
        max_context: most tokens of one segment.
        max_segments: most segments of one trajectory.
        limit_bytes: the limit.
        limit_name: what the message calls it, so that the user knows what to raise.
    """
    need = worst_case_redis_bytes(learner, evaluation, max_context, max_segments)
    if need <= limit_bytes:
        return None
    segments = ""
    if max_segments > 1:
        segments = (
            f"{max_segments} segments (env.max_turns; of agents agent.max_session_tokens / "
            "model.max_context) of "
        )
    return (
        f"{limit_name} ({limit_bytes / MIB:.0f} MiB) must hold the worst case in flight, "
        f"{need / MIB:.0f} MiB: (learner.max_staleness {learner.max_staleness} + 1) x "
        f"learner.groups_per_batch {learner.groups_per_batch} x learner.group_size "
        f"{learner.group_size} trajectories of {segments}model.max_context {max_context} tokens, "
        f"and up to {MAX_QUESTIONS_IN_FLIGHT} of evaluation; raise it or lower one of these"
    )
