"""Checkpoints: a changed, missing or foreign file is found and named; exports load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1.learner.engine.model_files import export_model
from agent_r1.runtime.files.writing import CHECKSUM_FILE, check_seal, seal
from agent_r1.weights.snapshot import Weights
from tests.support.tiny_models import build_model, build_tokenizer, save_model

FACTS = {"engine.zero_stage": 2, "model.dtype": "float32"}


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    directory = tmp_path / "step_3"
    (directory / "engine").mkdir(parents=True)
    (directory / "engine" / "weights.pt").write_bytes(b"0123456789")
    (directory / "engine" / "optimizer.pt").write_bytes(b"abc")
    seal(directory, FACTS)
    return directory


def test_an_untouched_checkpoint_opens(sealed: Path):
    check_seal(sealed, FACTS)


def test_a_flipped_byte_is_found(sealed: Path):
    (sealed / "engine" / "weights.pt").write_bytes(b"0123456780")
    with pytest.raises(
        ValueError, match=r"weights\.pt is corrupted: its checksum differs; .*older"
    ):
        check_seal(sealed, FACTS)


def test_a_cut_file_is_found(sealed: Path):
    (sealed / "engine" / "weights.pt").write_bytes(b"012")
    with pytest.raises(
        ValueError, match=r"weights\.pt is corrupted: it has 3 bytes .* 10; .*older"
    ):
        check_seal(sealed, FACTS)


def test_a_missing_file_is_found(sealed: Path):
    (sealed / "engine" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"optimizer\.pt is missing from the checkpoint; .*older"):
        check_seal(sealed, FACTS)


def test_an_unfinished_checkpoint_is_found(sealed: Path):
    (sealed / CHECKSUM_FILE).unlink()
    with pytest.raises(ValueError, match="checkpoint was not finished; resume from an older"):
        check_seal(sealed, FACTS)


def test_a_corrupted_checksum_file_is_found(sealed: Path):
    (sealed / CHECKSUM_FILE).write_text('{"files": ')
    with pytest.raises(ValueError, match=r"checksums\.json is corrupted"):
        check_seal(sealed, FACTS)


def test_another_stage_is_refused(sealed: Path):
    with pytest.raises(ValueError, match=r"engine\.zero_stage = 2 and .* engine\.zero_stage = 1"):
        check_seal(sealed, FACTS | {"engine.zero_stage": 1})


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_directory_loads_as_the_same_model(tmp_path: Path, tied: bool):
    source = save_model(tmp_path / "source", tied=tied)
    model = build_model(seed=5, tied=tied)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    export_model(tmp_path / "out", Weights(tensors, aliases), model, str(source))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert loaded.config.tie_word_embeddings is tied
    assert loaded.generation_config.eos_token_id == 2
    dialogue = [{"role": "user", "content": "hi"}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = build_tokenizer().apply_chat_template(dialogue, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(dialogue, add_generation_prompt=True) == expected
