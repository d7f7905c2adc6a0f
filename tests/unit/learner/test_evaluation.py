"""What an evaluation during training reports of its results."""

from __future__ import annotations

from agent_r1.learner.evaluation import Evaluation
from agent_r1.runtime.evaluation_client import EvalResult, summarise
from agent_r1_proto.rewards import Reward
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import rollout_task, scored


def evaluation_of(*results: EvalResult) -> Evaluation:
    return Evaluation("during", 3, 3, summarise(results), list(results), 1.0)


def test_metrics_have_the_reward_every_component_and_calls_by_tool():
    task = Task(id="q", prompt="who?", metadata={"set": "desk"})
    rollout = rollout_task(task=task, purpose="eval")
    calls = [ToolCallRecord(end_token_index=4, tool="notes", status="ok")] * 2
    reward = Reward(total=0.25, components={"desk:brief": 0.5})
    answered = EvalResult(task, scored(rollout, calls=calls).replace(reward=reward))
    failed = EvalResult(task, scored(rollout, status="FAILED", reason="tool_timeout: notes"))
    assert evaluation_of(answered, failed).metrics() == {
        "eval/step": 3.0,
        "eval/desk/n": 1.0,
        "eval/desk/failed": 1.0,
        "eval/desk/reward": 0.25,
        "eval/desk/desk:brief": 0.5,
        "eval/desk/calls/notes": 2.0,
    }
