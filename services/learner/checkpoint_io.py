"""Checkpoints of the engine, checked when read; and the Hugging Face directory of a policy.

deepspeed_engine.py --files--> seal_state --checksums.json--> open_state, on resume.

`checksums.json` is written last: a directory without it is an unfinished checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from agent_r1.learner.durable import (
    hash_file,
    replace_directory,
    report_full_disk,
    sync_tree,
)
from agent_r1.learner.snapshot import SNAPSHOT_FILE, Weights, write_safetensors

CHECKSUM_FILE = "checksums.json"
_OLDER = "resume from an older checkpoint of the run"


def seal_state(directory: Path, facts: dict[str, Any]) -> None:
    """Sync every file under `directory`, then write their checksums and `facts` beside them.

    Args:
        directory: a checkpoint whose files are complete.
        facts: what a reader must match: ranks, stage, dtype.
    """
    files = {
        str(path.relative_to(directory)): {
            "size_bytes": path.stat().st_size,
            "sha256": hash_file(path),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != CHECKSUM_FILE
    }
    text = json.dumps({"facts": facts, "files": files}, indent=1, sort_keys=True)
    staged = directory / f"{CHECKSUM_FILE}.tmp"
    staged.write_text(text, encoding="utf-8")
    staged.rename(directory / CHECKSUM_FILE)
    sync_tree(directory)


def open_state(directory: Path, facts: dict[str, Any]) -> None:
    """Check that a checkpoint is complete, unchanged, and was written by an engine like this one.

    Raises:
        ValueError: it is not; the message names the file or the setting, and the remedy.
    """
    checksum_file = directory / CHECKSUM_FILE
    if not checksum_file.is_file():
        raise ValueError(
            f"{directory} has no {CHECKSUM_FILE}: the checkpoint was not finished; {_OLDER}"
        )
    try:
        sealed = json.loads(checksum_file.read_text(encoding="utf-8"))
        files, found_facts = dict(sealed["files"]), dict(sealed["facts"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"{checksum_file} is corrupted ({exc}); {_OLDER}") from exc
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing from the checkpoint; {_OLDER}")
        size = path.stat().st_size
        if size != expected["size_bytes"]:
            raise ValueError(
                f"{path} is corrupted: it has {size} bytes and was written with "
                f"{expected['size_bytes']}; {_OLDER}"
            )
        if hash_file(path) != expected["sha256"]:
            raise ValueError(f"{path} is corrupted: its checksum differs; {_OLDER}")
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
