"""`agent-r1 matrix` with every method on every public data set: real services, random weights.

One question of each set, in the form in which the set is published. What such a model says is
nothing; that every question is asked, carried out and scored is what counts. The suite asks two
methods of a trained model (test_training_run.py); this is `make test-models`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.experiments.config import METHODS, SET_NAMES
from agent_r1.evaluation.experiments.data_sets import CODE, DATA_SETS
from tests.support.architectures import SIZES
from tests.support.fakes import build_tokenizer
from tests.support.runs import finished
from tests.unit.evaluation.experiments.test_data_sets import SAMPLES

PROGRAMS = {name for name in SET_NAMES if DATA_SETS[name].family is CODE}
pytestmark = [pytest.mark.vllm, pytest.mark.models, pytest.mark.timeout(1800)]
CONTEXT = 8192
"""Tokens; a byte is one, and the prompts that describe tools are long."""
RUN_TOML = """
[run]
id = "matrix"

[model]
path = "model"
dtype = "float32"
max_context = {context}

[data]
train = ["train.jsonl"]

[env]
max_turns = 3
max_tokens_per_turn = 16

[rollout]
kv_cache_gib = 0.5

[tools.search]
type = "search"
corpus = "corpus.jsonl"

[tools.python_exec]
type = "python_exec"

[tools.code_tests]
type = "code_tests"
"""
MATRIX_TOML = """
config = "run.toml"
results = "results/all"
methods = {methods}

[sets]
{sets}

[[models]]
name = "random"
policy = "model"

[[decode]]
method = "greedy"

[[decode]]
method = "majority"
candidates = 2
temperature = 0.7
"""


def save_model(folder: Path) -> None:
    """Write a random model that reads long prompts."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = build_tokenizer()
    sizes: dict[str, Any] = {**SIZES, "max_position_embeddings": CONTEXT}
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Every cell of the report, by set, method and way of decoding."""
    folder = tmp_path_factory.mktemp("matrix")
    save_model(folder / "model")
    for name in SET_NAMES:
        (folder / f"{name}.jsonl").write_text(json.dumps(SAMPLES[name]) + "\n")
    passage = {"id": "1", "title": "Ada", "text": "Ada wrote it in London."}
    (folder / "corpus.jsonl").write_text(json.dumps(passage) + "\n")
    (folder / "train.jsonl").write_text(json.dumps({"id": "q", "prompt": "Who?"}) + "\n")
    (folder / "run.toml").write_text(RUN_TOML.format(context=CONTEXT))
    sets = "\n".join(f'{name} = "{name}.jsonl"' for name in SET_NAMES)
    file = folder / "matrix.toml"
    file.write_text(MATRIX_TOML.format(methods=json.dumps(METHODS), sets=sets))
    finished("matrix", file, "--out", folder / "out", timeout_s=1500.0)
    found = json.loads((folder / "out" / "all.json").read_text())
    assert list((folder / "out").glob("all*.svg"))
    return {(cell["set"], cell["method"], cell["decode"]): cell for cell in found["cells"]}


def test_every_set_is_asked_by_every_method_and_scored(
    cells: dict[tuple[str, str, str], dict[str, Any]],
):
    ran = {place for place, cell in cells.items() if not cell["missing"]}
    expected = {(name, method, "greedy") for name in SET_NAMES for method in METHODS}
    # Programs are not equal as texts, so there is no majority among them.
    expected |= {
        (name, method, "majority_2") for name, method, _ in expected if name not in PROGRAMS
    }
    assert ran == expected
    for place in ran:
        cell = cells[place]
        assert (cell["n"], cell["failed"]) == (1, 0), place
        assert cell["sampled_tokens"][0] > 0, place
        if place[1] in ("direct", "chain_of_thought") and place[0] not in PROGRAMS:
            assert cell["calls"][0] == 0, place
