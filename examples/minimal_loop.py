"""The whole algorithm on one page: GRPO for a search agent, in one process.

    make setup && .venv/bin/python scripts/demo --world-only   # the data, once
    .venv/bin/python examples/minimal_loop.py                  # about a minute on two CPU cores

Each step samples a group of trajectories per question, scores them, compares every trajectory with
its group, takes one optimizer step on the tokens the policy sampled, and hands the new weights to
the sampler. `agent-r1 train` does the same with services that scale and fail independently: there,
`sample` is rollout/agent_loop.py, the loop below is learner/train.py, and what stands between them
is Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1.config.run import load_config
from agent_r1.learner.algorithms.advantages.grpo import group_relative_advantages
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.reward.scoring import exact_match
from agent_r1.rollout.chat_format import ChatFormat, load_tokenizer
from agent_r1.rollout.parsing import parse_turn
from agent_r1.rollout.vllm.settings import VllmSettings, prepare_environment, read_model
from agent_r1.tools.base import CallContext
from agent_r1.tools.search.tool import open_search_tool
from agent_r1_proto.tasks import ChatMessage

EXAMPLE = Path(__file__).parent / "tiny_world"
SEARCH_TIMEOUT_S = 10.0


@dataclass
class Rollout:
    """One trajectory: its tokens, which of them the policy sampled, and how likely they were."""

    token_ids: list[int]
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    answer: str | None = None

    def append(self, token_ids: list[int], logprobs: list[float] | None = None) -> None:
        """Add sampled tokens with their log-probabilities, or tokens that were given."""
        self.token_ids += token_ids
        self.action_mask += [logprobs is not None] * len(token_ids)
        self.logprobs += logprobs or [0.0] * len(token_ids)


async def sample(
    policy: Any, chat: ChatFormat, tool: Any, env: Any, task: Any, seed: int
) -> Rollout:
    """Let the policy write, run its calls, show it the results, until it answers."""
    prompt = chat.render_prompt([ChatMessage(role="user", content=task["prompt"])]).token_ids
    rollout = Rollout([])
    rollout.append(prompt)
    for number in range(env.max_turns):
        name = f"{task['id']}-{seed}-{number}"
        turn = await policy.generate(
            rollout.token_ids,
            max_tokens=env.max_tokens_per_turn,
            temperature=1.0,
            seed=seed * env.max_turns + number,
            request_id=name,
        )
        rollout.append(turn.token_ids, turn.logprobs)
        written = parse_turn(chat.decode_turn(turn.token_ids))
        rollout.answer = written.answer
        readable = [call for call in written.calls if not call.error]
        if written.answer is not None or turn.finish_reason == "length" or not readable:
            break
        call = readable[0]
        context = CallContext(name, number, None, SEARCH_TIMEOUT_S)
        result = await tool.call(call.arguments, context)
        rollout.append(chat.encode_reply(["tool"], [chat.encode_text(result.text())]))
    return rollout


def to_train_samples(group: list[Rollout], rewards: list[float]) -> list[TrainSample]:
    """Give every sampled token of a trajectory the trajectory's advantage within its group."""
    advantages = group_relative_advantages(rewards)
    return [
        TrainSample(
            token_ids=np.array(rollout.token_ids, np.int32),
            loss_mask=np.array(rollout.action_mask, np.bool_),
            rollout_logprobs=np.array(rollout.logprobs, np.float32),
            advantages=np.where(rollout.action_mask, advantage, 0.0).astype(np.float32),
        )
        for rollout, advantage in zip(group, advantages, strict=True)
    ]


async def train(steps: int, questions_per_step: int, group_size: int) -> None:
    """Run the loop."""
    config = load_config(EXAMPLE / "run.toml").config
    settings = VllmSettings(
        config.model.path, max_context=config.model.max_context, max_num_seqs=128
    )
    prepare_environment(settings)
    # These read the environment when they are imported.
    from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
    from agent_r1.rollout.vllm.policy import VllmPolicy

    tasks = [json.loads(line) for line in (EXAMPLE / "data" / "train.jsonl").open()]
    tool = open_search_tool("search", config.tools["search"])
    chat = ChatFormat(
        load_tokenizer(config.model.path), end_of_turn_ids=read_model(settings).eos_token_ids
    )
    learner = config.learner.model_copy(update={"warmup_steps": 0, "lr_schedule": "constant"})
    engine = DeepSpeedPolicyEngine(config.model, learner)
    policy = VllmPolicy(settings)
    await asyncio.gather(policy.start(), tool.start())
    try:
        for step in range(1, steps + 1):
            started = time.monotonic()
            first = (step - 1) * questions_per_step
            batch = tasks[first : first + questions_per_step]
            rollouts = await asyncio.gather(
                *(
                    sample(policy, chat, tool, config.env, task, seed)
                    for task in batch
                    for seed in range(group_size)
                )
            )
            samples, rewards = [], []
            for i, task in enumerate(batch):
                group = rollouts[i * group_size : (i + 1) * group_size]
                scores = [
                    exact_match(rollout.answer, task["payload"]["answers"]) for rollout in group
                ]
                samples += to_train_samples(group, scores)
                rewards += scores
            engine.train_batch(samples, LossSpec(policy_loss="ppo"))
            with tempfile.TemporaryDirectory() as folder:
                manifest = engine.write_snapshot(Path(folder), "minimal", step)
                await policy.load_weights(manifest)
            step_s = time.monotonic() - started
            print(f"step {step}/{steps}  reward {np.mean(rewards):.3f}  {step_s:.1f} s")
    finally:
        await policy.stop()
        await tool.stop()
        engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--questions", type=int, default=16, help="questions a step (default: 16)")
    parser.add_argument("--group-size", type=int, default=8, help="samples a question (default: 8)")
    asked = parser.parse_args()
    asyncio.run(train(asked.steps, asked.questions, asked.group_size))
