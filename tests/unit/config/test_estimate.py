"""What a run takes, worked out by hand for a model of 1000 weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.config.estimate import (
    CUDA,
    ENGINE,
    FRAGMENTS,
    LIVE,
    NCCL,
    ModelSize,
    activation_parts,
    bucket_parts,
    disk_parts,
    kv_bytes_per_token,
    learner_parts,
    microbatch_tokens,
    offloaded_parts,
    read_model_size,
    rollout_parts,
    state_parts,
    total,
)
from agent_r1.config.run import Config
from agent_r1.learner.config import GRADIENT_BUCKET, EngineConfig
from agent_r1.runtime.config import ModelConfig
from tests.support.public_models import QWEN2

SIZE = ModelSize(
    weights=1000,
    layers=2,
    hidden=8,
    intermediate=16,
    heads=2,
    queries=8,
    keys=4,
    vocabulary=32,
    tied=True,
)


def config(**tables: dict[str, Any]) -> Config:
    model = {"path": "none", "max_context": 512, **tables.pop("model", {})}
    env = {"max_tokens_per_turn": 64}
    return Config.model_validate({"model": model, "env": env, **tables})


def sizes(table: dict[str, Any], dtype: Any = "float32") -> list[float]:
    engine = EngineConfig.model_validate(table)
    return [part.size for part in state_parts(SIZE, engine, dtype, "policy")]


def test_float32_without_zero():
    # 4 bytes a weight, 4 a gradient, 8 AdamW.
    assert sizes({}) == [4000, 4000, 8000]


def test_bfloat16_runs_as_stage_1():
    # 2 a weight; a gradient 2 as it comes and 4 in the sum; (4 + 8) / 2 ranks.
    assert sizes({"ranks": 2}, "bfloat16") == [2000, 6000, 6000]


def test_stage_2_divides_the_sum_of_gradients():
    # 2 a weight; 4 / 2 ranks of the sum; (4 + 8) / 2 ranks.
    assert sizes({"ranks": 2, "zero_stage": 2}, "bfloat16") == [2000, 2000, 6000]


def test_stage_3_divides_everything():
    assert sizes({"ranks": 4, "zero_stage": 3}, "bfloat16") == [500, 1000, 3000]


def offloaded(table: dict[str, Any], *, page_locked: bool = False) -> list[float]:
    engine = EngineConfig.model_validate(table)
    parts = offloaded_parts(SIZE, engine, "bfloat16", "policy", page_locked=page_locked)
    return [part.size for part in parts]


def test_offload_moves_the_optimizer_away():
    table = {"ranks": 4, "zero_stage": 2, "offload": "optimizer"}
    assert sizes(table, "bfloat16") == [2000, 1000]
    # Of 250 weights: 8 AdamW; 4 master weights, 4 gradients and a copy of 2.
    assert offloaded(table) == [2000, 2500]


def test_offload_under_stage_1_keeps_the_sum_of_gradients_whole():
    # 2 a weight; 4 of the whole sum and 4 / 4 ranks of this rank's part.
    assert sizes({"ranks": 4, "zero_stage": 1, "offload": "optimizer"}, "bfloat16") == [2000, 5000]


def test_offload_under_stage_3_takes_the_gradients_along():
    table = {"ranks": 4, "zero_stage": 3, "offload": "optimizer"}
    assert sizes(table, "bfloat16") == [500, 0]
    # Of 250 weights: 8 AdamW and 4 master weights; the gradients of 4 as they come and as AdamW
    # reads them.
    assert offloaded(table) == [3000, 2000]


def test_offload_of_all_takes_the_weights_along():
    table = {"ranks": 4, "zero_stage": 3, "offload": "all"}
    assert sizes(table, "bfloat16") == [0, 0]
    assert offloaded(table) == [3000, 2000 + 500]


def test_page_locked_blocks_are_rounded_up_to_a_power_of_two():
    table = {"ranks": 4, "zero_stage": 2, "offload": "optimizer"}
    # Blocks of 1000, 1000 and 500 bytes become 1024, 1024 and 512.
    assert offloaded(table, page_locked=True)[-1] == 24 + 24 + 12


def buckets(table: dict[str, Any], dtype: Any = "bfloat16", size: ModelSize = SIZE) -> list[float]:
    engine = EngineConfig.model_validate(table)
    return [part.size for part in bucket_parts(size, None, engine, dtype)]


def test_buckets_hold_the_gradients_of_what_is_trained():
    assert buckets({}) == []
    assert buckets({"zero_stage": 2}) == [1000 * 2]
    # Stage 1 with offload reduces the float32 sum.
    assert buckets({"zero_stage": 1, "offload": "optimizer"}) == [1000 * 4]
    # Two ranks exchange a copy of what is in the bucket, and gather the weights that they use.
    assert buckets({"zero_stage": 3, "ranks": 2}) == [(1000 + 1000) * 2, 1000 * 2]
    assert buckets({"zero_stage": 3}) == [1000 * 2]
    assert buckets({}, "float32") == []


def test_a_bucket_has_a_limit():
    large = dataclasses.replace(SIZE, weights=3 * GRADIENT_BUCKET)
    assert large.trained > GRADIENT_BUCKET
    assert buckets({"zero_stage": 2}, size=large) == [GRADIENT_BUCKET * 2]


def test_no_more_than_a_limit_is_gathered_at_a_time():
    size = dataclasses.replace(SIZE, weights=3 * LIVE)
    engine = EngineConfig(zero_stage=3, ranks=2)
    *_, gathered = bucket_parts(size, None, engine, "bfloat16")
    assert gathered.size == LIVE * 2


def test_a_gpu_holds_cuda_and_fragments_too():
    plain = learner_parts(config(), SIZE, None, on_gpu=True)
    two = learner_parts(config(engine={"ranks": 2}), SIZE, None, on_gpu=True)
    assert plain[-1].size == CUDA
    assert two[-1].size == CUDA + NCCL
    assert plain[-2].size == pytest.approx(FRAGMENTS * total(plain[:-2]))


def test_backend_ipc_keeps_copies_of_the_weights_on_the_gpu():
    model = {"dtype": "bfloat16"}
    engine = {"device": "cuda", "max_tokens_per_microbatch": 100}
    sent = {"transport": "collective"}
    mapped = {**sent, "collective_backend": "ipc"}
    plain, copied = (
        total(
            learner_parts(config(model=model, engine=engine, learner=way), SIZE, None, on_gpu=True)
        )
        for way in (sent, mapped)
    )
    # 1000 weights of 2 bytes: the version that is held, and the next one beside it.
    assert copied - plain == pytest.approx(2 * 2000 * (1 + FRAGMENTS))


def test_checkpointing_keeps_the_inputs_of_the_layers_and_one_layer():
    model = ModelConfig(path="none")
    kept = {}
    for name in (True, False):
        table = EngineConfig(activation_checkpointing=name, share_prefixes=False)
        kept[name] = next(iter(activation_parts(SIZE, table, model, 100, on_gpu=True))).size
    # All layers are twice one; 100 tokens x 4 bytes x 8 are the inputs of one.
    assert kept[True] == kept[False] / 2 + 2 * 100 * 4 * 8


def test_a_trajectory_longer_than_a_micro_batch_has_one_of_its_own():
    assert microbatch_tokens(config(engine={"max_tokens_per_microbatch": 100})) == 512
    small = {"groups_per_batch": 1, "group_size": 2}
    assert microbatch_tokens(config(learner=small)) == 2 * 512


def test_a_loss_of_whole_trajectories_takes_all_segments_at_once():
    # 5 turns, each of which may be a segment of 512 tokens.
    env = {"rewritten_history": "segments", "max_tokens_per_turn": 64}
    few = {"max_tokens_per_microbatch": 100}
    assert microbatch_tokens(config(env=env, engine=few)) == 512
    gspo = config(env=env, engine=few, learner={"algorithm": "gspo"})
    assert microbatch_tokens(gspo) == 5 * 512


def test_reference_and_critic_are_counted():
    plain = total(learner_parts(config(), SIZE, None, on_gpu=False))
    both = config(learner={"algorithm": "ppo", "kl": "loss"})
    with_both = total(learner_parts(both, SIZE, SIZE, on_gpu=False))
    # A reference of 4 bytes a weight, and a critic of 16.
    assert with_both - plain == 4 * 1000 + 16 * 1000


def test_the_kv_cache_of_a_gpu_is_what_is_left():
    # 2 (keys and values) x 2 layers x 4 x 4 bytes.
    assert kv_bytes_per_token(SIZE, "float32") == 64
    parts = rollout_parts(config(), SIZE, 10e9)
    assert parts[1].size == pytest.approx(0.85 * 10e9 - 4000 - ENGINE)
    # Over two GPUs, half of the weights are on each, and they talk.
    parts = rollout_parts(config(rollout={"tensor_parallel_size": 2}), SIZE, 10e9)
    assert parts[1].size == pytest.approx(0.85 * 10e9 - 2000 - ENGINE - NCCL)


def test_a_cpu_engine_keeps_embedding_and_head_packed_too():
    weights, cache = rollout_parts(config(rollout={"kv_cache_gib": 2}), SIZE, None)
    assert weights.size == 4000 + 2 * 32 * 8 * 4
    assert cache.size == 2 * 2**30


def test_disk_for_checkpoints_and_versions():
    checkpoints, versions = disk_parts(config(), SIZE, None)
    # 2 newest, 1 best, 1 being written; each 12 bytes of state a weight, and a model of 4.
    assert checkpoints.size == 4 * 1000 * 16
    assert versions.size == 3 * 4000
    assert disk_parts(config(learner={"transport": "collective"}), SIZE, None)[1].size == 0


def test_weights_are_counted_without_loading_them(tiny_base_dir: Path):
    found = read_model_size(tiny_base_dir)
    # float32: 4 bytes each; the rest of the file is its header.
    file_size = (tiny_base_dir / "model.safetensors").stat().st_size
    assert 0 <= file_size - 4 * found.weights < 10_000


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no usable config\.json"):
        read_model_size(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "qwen99"}, "has model type `qwen99` but Transformers does not recognize"),
        ({"model_type": "t5"}, "Unrecognized configuration class"),
        ({"model_type": "whisper"}, "has no usable config.json"),
        ({"hidden_size": 10, "num_attention_heads": 3}, "(3) must divide hidden_size (10)"),
        ({"num_key_value_heads": 3}, "(3) must divide num_attention_heads (4)"),
        ({"hidden_size": "x"}, "expected int, got str (value: 'x')"),
        ({"num_attention_heads": 0}, "num_attention_heads (0) must be 1 or more"),
        ({"num_hidden_layers": 0}, "num_hidden_layers (0) must be 1 or more"),
        ({"vocab_size": -1}, "vocab_size (-1) must be 1 or more"),
        ("[1, 2", "is not a valid JSON file"),
        ("null", "has no usable config.json"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, values: dict[str, object] | str, said: str
):
    usual = {**QWEN2, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    usual |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    text = values if isinstance(values, str) else json.dumps(usual | values)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is looked at below
        read_model_size(tmp_path)
    error = str(caught.value)
    assert said in error
    assert f"model.path ({tmp_path})" in error
    assert "\n" not in error
    assert len(error) < 500


def test_adapters_alone_have_gradients_optimizer_versions_and_state():
    size = dataclasses.replace(SIZE, adapters=100)
    lora = config(model={"lora": {"rank": 1}}, learner={"kl": "loss"})
    found = {part.name: part.size for part in learner_parts(lora, size, None, on_gpu=False)}
    # 4 bytes of 1000 + 100 weights; 4 of a gradient and 8 of AdamW for each of the 100.
    assert found["policy: weights"] == 4400
    assert (found["policy: gradients"], found["policy: optimizer"]) == (400, 800)
    # The reference is the policy without its adapter.
    assert not [name for name in found if name.startswith("reference")]
    checkpoints, versions = disk_parts(lora, size, None)
    # 4 checkpoints of 12 + 4 bytes a weight; versions of 4 bytes, one of them being written.
    assert checkpoints.size == 4 * 100 * 16
    assert versions.size == (lora.learner.keep_versions + 1) * 100 * 4
    # The engine of a CPU serves the model as it is, and keeps embedding and head packed too.
    assert rollout_parts(lora, size, None)[0].size == 4000 + 2 * 32 * 8 * 4
