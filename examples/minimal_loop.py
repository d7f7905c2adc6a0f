"""The whole algorithm on one page: GRPO for a search agent, in one process.

    make setup && .venv/bin/python scripts/demo --world-only   # the data, once
    .venv/bin/python examples/minimal_loop.py                  # about a minute on two CPU cores

Each step samples a group of trajectories per question, scores them, compares each with its group,
takes one optimizer step on the sampled tokens, and hands the new weights to the sampler; the same
as the services of `agent-r1 train` do (`sample`: rollout/agent_loop.py, `train`: learner/train.py).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1.config.run import load_config
from agent_r1.learner.algorithms.advantages.grpo import group_relative_advantages
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.reward.scoring import exact_match
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.policy import Policy
from agent_r1.rollout.vllm.settings import VllmSettings, prepare_environment, read_model
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1.text.chat_format import ChatFormat, OutsideMessage
from agent_r1.text.chat_template import load_tokenizer
from agent_r1.text.reading import parse_turn
from agent_r1.tools.base import CallContext, Tool
from agent_r1.tools.search.tool import open_search_tool
from agent_r1.weights.snapshot import write_snapshot
from agent_r1_proto.tasks import Task

CONFIG = Path(__file__).parent / "tiny_world" / "run.toml"


@dataclass
class Rollout:
    """One trajectory: its tokens, which of them the policy sampled, and how likely they were."""

    token_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    answer: str | None = None

    def append(self, token_ids: list[int], logprobs: list[float] | None = None) -> None:
        """Add sampled tokens with their log-probabilities, or tokens that were given."""
        self.token_ids += token_ids
        self.action_mask += [logprobs is not None] * len(token_ids)
        self.logprobs += logprobs or [0.0] * len(token_ids)


async def sample(
    policy: Policy, chat: ChatFormat, tool: Tool, env: EnvConfig, task: Task, seed: int
) -> Rollout:
    """Let the policy write, run its calls, show it the results, until it answers."""
    rollout = Rollout()
    rollout.append(chat.render_prompt(task.messages()).token_ids)
    for number in range(env.max_turns):
        name = f"{task.id}/{seed}/{number}"
        generation = await policy.generate(
            rollout.token_ids,
            max_tokens=env.max_tokens_per_turn,
            temperature=1.0,
            seed=seed * env.max_turns + number,
            request_id=name,
        )
        rollout.append(generation.token_ids, generation.logprobs)
        turn = parse_turn(chat.decode_turn(generation.token_ids))
        rollout.answer = turn.answer
        if turn.answer is not None or not turn.calls or turn.calls[0].error:
            break
        context = CallContext(name, number, None, timeout_s=10.0)
        result = await tool.call(turn.calls[0].arguments, context)
        text = result if isinstance(result, str) else result.text()
        rollout.append(chat.encode_reply([OutsideMessage("tool", text, chat.encode_text(text))]))
    return rollout


def train_samples(group: list[Rollout], rewards: list[float]) -> list[TrainSample]:
    """Give every sampled token of a trajectory the trajectory's advantage within its group."""
    return [
        TrainSample(
            token_ids=np.array(rollout.token_ids, np.int32),
            loss_mask=np.array(rollout.action_mask, np.bool_),
            rollout_logprobs=np.array(rollout.logprobs, np.float32),
            advantages=np.where(rollout.action_mask, advantage, 0.0).astype(np.float32),
        )
        for rollout, advantage in zip(group, group_relative_advantages(rewards), strict=True)
    ]


async def train(config_file: Path, steps: int, questions: int, group_size: int) -> None:
    """Take `steps` optimizer steps on `questions` groups of `group_size` trajectories each."""
    config = load_config(config_file).config
    assert config.data is not None
    model = config.model
    settings = VllmSettings(model, RolloutConfig(max_concurrent=128))
    prepare_environment(settings)
    # These read the environment when they are imported.
    from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
    from agent_r1.learner.engine.ranks.messages import EngineSetup
    from agent_r1.rollout.vllm.policy import VllmPolicy

    ends = read_model(settings).eos_token_ids
    chat = ChatFormat(load_tokenizer(model.path), end_of_turn_ids=ends)
    tool = open_search_tool("search", config.tools["search"])
    setup = EngineSetup.of(model, config.engine)
    policy, engine = VllmPolicy(settings), DeepSpeedPolicyEngine(setup, total_steps=steps)
    tasks = itertools.cycle(read_task_file(config.data.train[0]))
    await asyncio.gather(policy.start(), tool.start())
    try:
        for step in range(1, steps + 1):
            samples, rewards = list[TrainSample](), list[float]()
            batch = list(itertools.islice(tasks, questions))
            attempts = [
                sample(policy, chat, tool, config.env, task, seed)
                for task, seed in itertools.product(batch, range(group_size))
            ]
            rollouts = iter(await asyncio.gather(*attempts))
            for task in batch:
                group = list(itertools.islice(rollouts, group_size))
                answers: Any = task.payload["answers"]
                scores = [exact_match(rollout.answer, answers) for rollout in group]
                samples += train_samples(group, scores)
                rewards += scores
            engine.train_batch(samples, LossSpec(policy_loss="ppo"))
            with tempfile.TemporaryDirectory() as at:
                await policy.load_weights(write_snapshot(Path(at), "loop", step, engine.weights()))
            print(f"step {step}/{steps}  reward {np.mean(rewards):.3f}", flush=True)
    finally:
        await asyncio.gather(policy.stop(), tool.stop())
        engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO for a search agent, in one process.")
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG, help=f"default: {CONFIG}")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (20)")
    parser.add_argument("--questions", type=int, default=16, help="questions a step (16)")
    parser.add_argument("--group-size", type=int, default=8, help="trajectories a question (8)")
    chosen = parser.parse_args()
    os.environ |= {"TQDM_DISABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the libraries' chatter
    asyncio.run(train(chosen.config, chosen.steps, chosen.questions, chosen.group_size))
