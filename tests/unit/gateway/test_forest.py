"""Turns of a forest: what their tokens say of the weights that sampled them."""

from __future__ import annotations

from agent_r1.gateway.forest import TurnNode
from agent_r1_proto.generation import GeneratedPart
from agent_r1_proto.trajectory import VersionSpan


def part(*spans: tuple[int, int, int]) -> GeneratedPart:
    """Tokens sampled by (version, start, end), counted from where a server began."""
    count = sum(end - start for _, start, end in spans)
    return GeneratedPart(
        token_ids=[7] * count,
        logprobs=[-0.5] * count,
        version_spans=[VersionSpan(policy_version=v, start=a, end=b) for v, a, b in spans],
    )


def test_spans_of_several_parts_and_servers_cover_each_token_once():
    turn = TurnNode(0, None, 0, "", begins=True, prompt=[1, 2])
    turn.add(part((3, 0, 2)))
    turn.add(part((3, 2, 3), (4, 3, 5)))  # weights changed within a part
    turn.add(part((4, 0, 2)))  # another server, which counts from its own beginning
    turn.add(part((3, 2, 3)))
    spans = [(s.policy_version, s.start, s.end) for s in turn.version_spans]
    assert spans == [(3, 0, 3), (4, 3, 7), (3, 7, 8)]
    assert len(turn.token_ids) == 8
