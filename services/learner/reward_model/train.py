"""`agent-r1 train-reward CONFIG`: stored trajectories in, a reward model out.

data.py --samples--> sft/supervised.py --> `train_reward.output`, a Hugging Face model directory,
and in its work folder `summary.json` with the report on held-out tasks (held_out_report.py).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

from agent_r1.learner.config import TrainRewardConfig
from agent_r1.learner.engine.interface import PolicyEngine, TrainSample
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.learner.reward_model.data import VerdictEncoder, train_and_test, training_data
from agent_r1.learner.reward_model.held_out_report import report
from agent_r1.learner.sft import supervised
from agent_r1.learner.sft.loss_mask import DialogueEncoder
from agent_r1.runtime.config import ModelConfig, RunConfig

logger = logging.getLogger(__name__)


def run(
    *,
    run: RunConfig,
    model: ModelConfig,
    train_reward: TrainRewardConfig,
    place: RankPlace | None = None,
    stop: threading.Event | None = None,
) -> bool:
    """Train to the end, or until it is interrupted; sft/supervised.py says more.

    Raises:
        ValueError: data, model or a setting is wrong; or the output exists already.
        EngineError: a rank failed, or memory or disk ran out.
    """
    config = train_reward
    supervised.check_output("train_reward", config)
    train, test = train_and_test(config)
    dialogues = DialogueEncoder(model.path, config.chat_template_kwargs)
    encoder = VerdictEncoder(
        dialogues, config.question, model.max_context, thoughts=config.thoughts
    )
    data = training_data(train, encoder, config)
    logger.info(
        "trajectories read train=%d test=%d verdicts=%d",
        len(train),
        len(test),
        len(data.samples),
    )

    def look(engine: PolicyEngine) -> dict[str, Any]:
        found = report(engine, train, test, encoder)
        logger.info("on tasks that were not trained on %s", json.dumps(found["held_out"]))
        return found

    def weigh(engine: PolicyEngine, batch: Sequence[int]) -> list[TrainSample]:
        return data.weighed(engine, batch, config.ranking)

    job = supervised.Job("train_reward", config, data, weigh if data.rivals else None, look)
    return supervised.train(run=run, model=model, job=job, place=place, stop=stop)
