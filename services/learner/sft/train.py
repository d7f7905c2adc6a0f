"""The supervised warm start, `agent-r1 sft CONFIG`: demonstrations in, a model directory out."""

from __future__ import annotations

import threading

from agent_r1.learner.config import SftConfig
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.learner.sft import supervised
from agent_r1.learner.sft.data import load_dialogues
from agent_r1.learner.sft.loss_mask import DialogueEncoder
from agent_r1.runtime.config import ModelConfig, RunConfig
from agent_r1.text.tool_formats import load_tool_format


def run(
    *,
    run: RunConfig,
    model: ModelConfig,
    sft: SftConfig,
    place: RankPlace | None = None,
    stop: threading.Event | None = None,
    tool_format: str = "hermes",
) -> bool:
    """Run the warm start to its end, or until it is interrupted; supervised.py says more.

    `tool_format` is `env.tool_format`.

    Raises:
        ValueError: data, model or a setting is wrong; or the output exists already.
        EngineError: a rank failed, or memory or disk ran out.
    """
    supervised.check_output("sft", sft)
    encoder = DialogueEncoder(model.path, sft.chat_template_kwargs, load_tool_format(tool_format))
    job = supervised.Job("sft", sft, load_dialogues(sft, encoder, model.max_context))
    return supervised.train(run=run, model=model, job=job, place=place, stop=stop)
