"""Every algorithm through the whole learner: real engine and Redis, rollouts are stand-ins."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import load_file

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.main import build_engine
from agent_r1.learner.objective import PRESETS
from agent_r1.learner.train import Learner
from agent_r1.runtime.config import ModelConfig
from agent_r1_proto.rewards import Reward, ScoredTrajectory
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Turn
from agent_r1_proto.weights import LoadReply, LoadRequest
from tests.support.builders import trajectory
from tests.support.learner_fakes import FakeServices, training_spec
from tests.support.runs import steps
from tests.support.tiny_models import VOCABULARY, save_model

LEARN_S = 60
# Prompt 3, sampled 4, tool text 3, sampled 4 tokens.
ACTIONS = np.array([0] * 3 + [1] * 4 + [0] * 3 + [1] * 4, bool)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("algorithms") / "model")


def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
    """Random tokens around tool text; odd samples are right, even ones wrong."""
    key = rollout.key
    rng = np.random.default_rng([key.group_id, key.sample_index])
    record = trajectory(
        rollout,
        prompt_length=3,
        num_sampled=len(ACTIONS) - 3,
        policy_version=version,
        token_ids=rng.integers(3, VOCABULARY, len(ACTIONS)).astype(np.int32),
        action_mask=ACTIONS,
        rollout_logprobs=np.where(ACTIONS, -5.0, 0.0).astype(np.float32),
        temperature=rollout.sampling.temperature,
        turns=[
            Turn(start=3, end=7, text="x", finish_reason="stop", process_reward=rng.random()),
            Turn(start=10, end=14, text="y", finish_reason="stop", state_key="found"),
        ],
    )
    right = float(key.sample_index % 2)
    return ScoredTrajectory(
        trajectory=record, reward=Reward(total=right, components={"exact_match": right})
    )


class Services(FakeServices):
    """Takes any weights without reading them."""

    async def _load(self, request: web.Request) -> web.Response:
        body = LoadRequest.model_validate_json(await request.read())
        self.version = body.policy_version
        self.loads.append(body.policy_version)
        reply = LoadReply(policy_version=self.version, fetch_s=0.01, pause_s=0.02)
        return web.Response(body=reply.model_dump_json(), content_type="application/json")


async def train(
    folder: Path, redis_url: str, run_id: str, model_dir: Path, **learner: Any
) -> Services:
    """Take two steps with a real engine."""
    spec = training_spec(
        folder,
        redis_url,
        run_id,
        model=ModelConfig(path=str(model_dir), max_context=128),
        steps=2,
        canary_tokens=0,
        engine=EngineConfig(device="cpu", torch_threads=1, lr=1e-3),
        **learner,
    )
    engine = build_engine(spec)
    try:
        async with (
            await Broker.connect(redis_url, run_id) as broker,
            Services(broker, answer=answer).running() as services,
        ):
            await asyncio.wait_for(Learner(spec, engine).run(), LEARN_S)
    finally:
        engine.close()
    assert isinstance(services, Services)
    return services


def moved(folder: Path, model_dir: Path) -> float:
    """Largest change of any weight since the model was loaded."""
    before = load_file(model_dir / "model.safetensors")
    after = load_file(folder / "weights" / "v2" / "model.safetensors")
    return max(float(np.abs(after[name] - before[name]).max()) for name in before)


@pytest.mark.parametrize("algorithm", PRESETS)
async def test_every_algorithm_learns_through_the_learner(
    tmp_path: Path, redis_url: str, run_id: str, model_dir: Path, algorithm: str
):
    services = await train(tmp_path / "run", redis_url, run_id, model_dir, algorithm=algorithm)
    lines = steps(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["grad/norm"] > 0 for line in lines)
    assert moved(tmp_path / "run", model_dir) > 1e-4
    greedy = [task for task in services.seen if task.sampling.temperature == 0.0]
    assert len(greedy) == (4 if algorithm == "remax" else 0)  # one a group
    assert ("loss/value" in lines[0]) == (algorithm in ("ppo", "turn_ppo"))
    assert ("advantage/shared_states" in lines[0]) == (algorithm == "gigpo")


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": "ppo", "advantage_mask": False},
        {"algorithm": "ppo", "advantage_mask": False, "loss_mask": False},
        {"algorithm": "grpo", "advantage_mask": False, "loss_mask": False},
        {"algorithm": "ppo", "kl": "reward", "kl_estimator": "k1", "gamma": 0.9, "lam": 0.9},
        {"algorithm": "grpo", "kl": "loss", "entropy_coef": 0.01},
        {"algorithm": "rloo", "importance_cap": 2.0, "importance_high": 50.0},
        {"algorithm": "reinforce_pp", "optimizer_steps_per_batch": 2, "dual_clip": 3.0},
    ],
    ids=lambda keys: "-".join(f"{key}={value}" for key, value in keys.items()),
)
async def test_keys_of_the_objective_go_together(
    tmp_path: Path, redis_url: str, run_id: str, model_dir: Path, keys: dict[str, Any]
):
    await train(tmp_path / "run", redis_url, run_id, model_dir, **keys)
    lines = steps(tmp_path / "run")
    assert len(lines) == 2
    assert all(math.isfinite(value) for line in lines for value in line.values())
    sampled = float(ACTIONS.sum())
    trained = len(ACTIONS) - 3.0 if keys.get("loss_mask") is False else sampled
    assert lines[0]["batch/trained_tokens"] == 4 * trained
    assert ("reward/kl" in lines[0]) == (keys.get("kl") == "reward")
    assert ("loss/kl_ref" in lines[0]) == (keys.get("kl") == "loss")


async def test_the_warm_up_of_a_critic_leaves_the_policy_alone(
    tmp_path: Path, redis_url: str, run_id: str, model_dir: Path
):
    keys = {"algorithm": "ppo", "critic_warmup_steps": 2}
    await train(tmp_path / "run", redis_url, run_id, model_dir, **keys)
    assert moved(tmp_path / "run", model_dir) == 0.0
    assert all("loss/value" in line and "grad/norm" not in line for line in steps(tmp_path / "run"))
