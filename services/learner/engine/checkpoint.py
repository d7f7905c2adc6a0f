"""Checkpoints of the engine, checked when read; and the Hugging Face directory of a policy.

zero.py --files--> `seal` --checksums.json--> `verify_checksums`, on resume.

`checksums.json` is written last: a directory without it is an unfinished checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from agent_r1.learner.weights.snapshot import Weights, write_safetensors
from agent_r1_proto.weights import SNAPSHOT_FILE
from agent_r1_service.files.writing import check_seal, replace_directory, report_full_disk

OLD_POLICY_TAG, OLD_CRITIC_TAG = "engine", "critic"
"""Folders that DeepSpeed wrote, one file a rank, up to version 0.2; readable with as many ranks."""


def is_old(directory: Path) -> bool:
    """Whether DeepSpeed wrote a checkpoint, in files of every rank."""
    return (directory / OLD_POLICY_TAG).is_dir()


def verify_checksums(directory: Path, facts: dict[str, Any]) -> None:
    """Check that a checkpoint is complete, unchanged, and was written by an engine like this one.

    Raises:
        ValueError: it is not; the message names the file or the setting, and the remedy.
    """
    found_facts = check_seal(directory)
    for name, value in facts.items():
        if found_facts.get(name) != value:
            raise ValueError(
                f"{directory} was written with {name} = {found_facts.get(name)} and this run has "
                f"{name} = {value}; set it back, or start from the checkpoint's model directory"
            )


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
        AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(staging)
        template = Path(tokenizer_path) / "chat_template.jinja"
        if template.is_file() and not (staging / template.name).exists():
            shutil.copyfile(template, staging / template.name)
        write_safetensors(staging / SNAPSHOT_FILE, weights)
