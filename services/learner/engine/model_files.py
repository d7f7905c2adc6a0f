"""Files of a checkpoint: the Hugging Face directory of a policy, and the engine's own by name."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from agent_r1.runtime.files.writing import replace_directory, report_full_disk
from agent_r1.weights.snapshot import Weights, write_safetensors
from agent_r1_proto.weights import SNAPSHOT_FILE

POLICY_FILE = "policy.safetensors"
CRITIC_FILE = "critic.safetensors"
WEIGHT = "weight"
"""Name, among a parameter's three tensors in these files, of the float32 weight that the optimizer
keeps."""
OLD_POLICY_TAG, OLD_CRITIC_TAG = "engine", "critic"
"""Folders of the older format: DeepSpeed's, one file a rank, readable with as many ranks."""


def is_old(directory: Path) -> bool:
    """Return whether DeepSpeed wrote a checkpoint, in files of every rank."""
    return (directory / OLD_POLICY_TAG).is_dir()


def export_model(
    directory: Path, weights: Weights, model: PreTrainedModel, tokenizer_path: str
) -> None:
    """Write a Hugging Face model directory, complete when it appears.

    Args:
        directory: where; replaced when it exists.
        weights: the policy's weights; a tied lm_head is left to its alias, as transformers does.
        model: gives config and generation config.
        tokenizer_path: model directory whose tokenizer and chat template are copied.

    Raises:
        DiskFullError: there is no room; nothing is left behind.
    """
    remedy = "lower learner.keep_last and learner.keep_best, or move run.dir to a larger disk"
    with (
        report_full_disk("the model directory", directory, weights.size_bytes, remedy),
        replace_directory(directory) as staging,
    ):
        model.config.save_pretrained(staging)
        if isinstance(model.generation_config, GenerationConfig):
            model.generation_config.save_pretrained(staging)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False)
        tokenizer.save_pretrained(staging)
        template = Path(tokenizer_path) / "chat_template.jinja"
        if template.is_file() and not (staging / template.name).exists():
            shutil.copyfile(template, staging / template.name)
        write_safetensors(staging / SNAPSHOT_FILE, weights)
