"""The training engine, for real: against plain torch, over micro-batches and ZeRO stages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    CohereConfig,
    CohereForCausalLM,
    PreTrainedModel,
)

from agent_r1.learner.algorithms import POLICY_LOSSES
from agent_r1.learner.algorithms.losses import LossInputs, LossOptions, PolicyLoss
from agent_r1.learner.config import EngineConfig, Layout
from agent_r1.learner.engine.critic import export_critic
from agent_r1.learner.engine.interface import PER_TOKEN, EngineError, LossSpec, TrainSample
from agent_r1.learner.engine.layout import build_microbatch
from agent_r1.learner.engine.microbatches import scoring_sample
from agent_r1.learner.engine.model import load_causal_model, prepare_layout
from agent_r1.learner.engine.model_files import CRITIC_FILE
from agent_r1.learner.engine.ranks.group import RankGroup
from agent_r1.learner.engine.ranks.messages import EngineSetup
from agent_r1.learner.objective import Aggregation
from agent_r1.runtime.config import ModelConfig
from tests.support import two_ranks
from tests.support.engines import (
    LAYOUTS,
    SAMPLES,
    gradient,
    make_engine,
    plain_loss,
    related,
    relative_distance,
    sequence_logprobs,
)
from tests.support.snapshot_files import write_version
from tests.support.tiny_models import VOCABULARY, save_model, with_values


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("engine") / "model")


def test_a_step_equals_plain_torch(model_dir: Path, tmp_path: Path):
    engine = make_engine(model_dir, max_grad_norm=0.5, weight_decay=0.1)
    metrics = [engine.train_batch(SAMPLES, LossSpec()) for _ in range(2)]
    write_version(engine, tmp_path / "v2", "run", 2)

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
    )
    for found in metrics:
        optimizer.zero_grad()
        loss = plain_loss(model, SAMPLES)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert found["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
        assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    written = load_file(tmp_path / "v2" / "model.safetensors")
    for name, expected in model.named_parameters():
        # AdamW divides by the root of a squared gradient: where that is tiny, rounding shows
        torch.testing.assert_close(written[name], expected, atol=2e-5, rtol=1e-4)


def test_only_matrices_decay_under_every_stage(model_dir: Path):
    found: list[np.ndarray] = []
    for stage in range(4):
        engine = make_engine(model_dir, zero_stage=stage, lr=1e-6, weight_decay=1e5)
        engine.train_batch(SAMPLES, LossSpec())  # AdamW takes 0.1 of each weight that decays
        found.append(two_ranks.weights(engine))
    for weights in found[1:]:
        np.testing.assert_allclose(weights, found[0], atol=1e-5)


def test_the_cut_into_microbatches_does_not_change_the_gradient(model_dir: Path):
    spec = LossSpec(drop_zero_advantages=False)
    whole = gradient(model_dir, SAMPLES, spec, max_tokens_per_microbatch=10_000)
    one_by_one = gradient(model_dir, SAMPLES, spec, max_tokens_per_microbatch=1)
    assert relative_distance(one_by_one, whole) <= 1e-5
    shuffled = gradient(model_dir, SAMPLES[::-1], spec)
    assert relative_distance(shuffled, whole) <= 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("layout", "attention"), [("packed", "sdpa"), ("packed", "eager"), ("shared", "sdpa")]
)
def test_every_layout_has_the_gradient_of_padding(
    model_dir: Path, layout: str, attention: str, checkpointing: bool
):
    samples = related(SAMPLES)
    spec = LossSpec(policy_loss="gspo", aggregation="sequence_mean", kl_coef=0.1, entropy_coef=0.01)
    settings = {"max_tokens_per_microbatch": 300, "activation_checkpointing": checkpointing}
    padded = gradient(model_dir, samples, spec, **settings, **LAYOUTS["padded"])
    other = gradient(model_dir, samples, spec, **settings, **LAYOUTS[layout], attention=attention)
    assert relative_distance(other, padded) <= 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shared_prefixes_change_no_step_under_any_stage(model_dir: Path, stage: int):
    samples = with_values(related(SAMPLES))
    spec = LossSpec(kl_coef=0.1, drop_zero_advantages=False)
    names = ("loss/total", "loss/value", "loss/kl_ref", "policy/entropy", "grad_norm")
    found: list[list[float]] = []
    for layout in ("padded", "shared"):
        settings = {"max_tokens_per_microbatch": 300, "zero_stage": stage, **LAYOUTS[layout]}
        engine = make_engine(model_dir, reference=True, critic=True, **settings)
        steps = [engine.train_batch(samples, spec) for _ in range(2)]
        found.append([m[name] for m in steps for name in (*names, "grad/critic_norm")])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def test_no_layout_but_the_padded_one_computes_padding_and_scores_are_equal(model_dir: Path):
    samples = with_values(related(SAMPLES))
    spec = LossSpec(drop_zero_advantages=False)
    metrics, scores = {}, {}
    for layout in LAYOUTS:
        settings = {"max_padding_share": 0.9, "max_tokens_per_microbatch": 300}
        engine = make_engine(model_dir, critic=True, **LAYOUTS[layout], **settings)
        metrics[layout] = engine.train_batch(samples, spec)
        scores[layout] = [
            np.concatenate(values)
            for values in (engine.token_logprobs(samples), engine.token_values(samples))
        ]
    for layout in ("packed", "shared"):
        assert metrics[layout]["batch/padding_share"] == 0.0
        for name in ("loss/total", "loss/value"):
            assert metrics[layout][name] == pytest.approx(metrics["padded"][name], rel=1e-5)
        for ours, expected in zip(scores[layout], scores["padded"], strict=True):
            np.testing.assert_allclose(ours, expected, atol=2e-5)
    assert metrics["padded"]["batch/padding_share"] > 0.0
    assert metrics["padded"]["batch/shared_share"] == metrics["packed"]["batch/shared_share"] == 0.0
    # Of five variants of each sample, two are equal and three begin alike up to a random token.
    assert metrics["shared"]["batch/shared_share"] > 0.3
    assert metrics["shared"]["batch/tokens"] == metrics["padded"]["batch/tokens"]


def cut_in_two(sample: TrainSample) -> TrainSample:
    """The sample in two segments: its first half, and all of it with that half as the prompt."""
    middle = sample.num_tokens // 2

    def cut(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        return np.concatenate((array[:middle], np.zeros_like(array[:middle]), array[middle:]))

    return dataclasses.replace(
        sample,
        token_ids=np.concatenate((sample.token_ids[:middle], sample.token_ids)),
        segment_starts=[middle],
        **{name: cut(getattr(sample, name)) for name in PER_TOKEN},
    )


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_trajectory_cut_into_segments_is_trained_as_the_whole(model_dir: Path, layout: str):
    # The history is unchanged, so every token has the prefix that it had.
    whole, cut = SAMPLES, [cut_in_two(sample) for sample in SAMPLES]
    spec = LossSpec(policy_loss="gspo", aggregation="sequence_mean", kl_coef=0.1)
    settings = {"max_tokens_per_microbatch": 64, **LAYOUTS[layout]}
    distance = relative_distance(
        gradient(model_dir, cut, spec, **settings), gradient(model_dir, whole, spec, **settings)
    )
    assert distance <= 1e-5
    engine = make_engine(model_dir, critic=True, **settings)
    whole = with_values(SAMPLES)
    cut = [cut_in_two(sample) for sample in whole]
    for ask in (engine.token_logprobs, engine.token_values):
        for part, one, ours, theirs in zip(cut, whole, ask(cut), ask(whole), strict=True):
            np.testing.assert_allclose(ours[part.loss_mask], theirs[one.loss_mask], atol=2e-5)
    found = [engine.train_batch(samples, LossSpec()) for samples in (cut, whole)]
    assert [metrics["batch/segments"] for metrics in found] == [2 * len(SAMPLES), len(SAMPLES)]
    assert found[0]["loss/value"] > 0


@pytest.mark.parametrize(("layout", "key"), [("packed", "packing"), ("shared", "share_prefixes")])
def test_a_model_that_cannot_tell_trajectories_apart_is_refused(
    model_dir: Path, layout: Layout, key: str
):
    def load() -> PreTrainedModel:
        return load_causal_model(ModelConfig(path=str(model_dir), max_context=512))

    prepare_layout(load(), layout)
    model = load()
    inner = model.get_decoder().forward

    def blind(*args: Any, position_ids: Any = None, plan: Any = None, **options: Any) -> Any:
        model.set_attn_implementation("sdpa")
        return inner(*args, **options)  # attends to all that came before

    model.get_decoder().forward = blind
    expected = rf"'qwen2' cannot be trained with.*{key} = true: .*; set engine\.{key} = false"
    with pytest.raises(ValueError, match=expected):
        prepare_layout(model, layout)


@pytest.mark.parametrize(("layout", "key"), [("packed", "packing"), ("shared", "share_prefixes")])
def test_a_model_with_a_sliding_window_has_no_row_for_all(tmp_path: Path, layout: Layout, key: str):
    model_dir = save_model(tmp_path / "model")
    config = json.loads((model_dir / "config.json").read_text())
    windows = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"use_sliding_window": True, "sliding_window": 64, "layer_types": windows}
    (model_dir / "config.json").write_text(json.dumps(config))
    model = load_causal_model(ModelConfig(path=str(model_dir), max_context=512))
    with pytest.raises(ValueError, match=rf"64 tokens only; set engine\.{key} = false"):
        prepare_layout(model, layout)


def test_another_attention_than_sdpa_is_refused_for_shared_prefixes(model_dir: Path):
    table = ModelConfig(path=str(model_dir), max_context=512, attention="eager")
    with pytest.raises(ValueError, match=r'attention = "eager"; set engine\.share_prefixes'):
        prepare_layout(load_causal_model(table), "shared")


@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_model_computes_is_checked_under_every_stage(tmp_path: Path, stage: int):
    config = CohereConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logit_scale=0.0625,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'cohere' cannot be trained: its logits are not"):
        make_engine(tmp_path, zero_stage=stage)


def test_tied_weights_that_differ_are_refused_where_they_are_divided(tmp_path: Path):
    model_dir = save_model(tmp_path / "model")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="ties weights that differ in its files; set tie_word_emb"):
        make_engine(model_dir, zero_stage=3)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_every_loss_and_aggregation_survives_the_cut(
    model_dir: Path, policy_loss: str, aggregation: Aggregation
):
    spec = LossSpec(policy_loss=policy_loss, aggregation=aggregation, dual_clip=3.0)
    whole = gradient(model_dir, SAMPLES, spec, max_tokens_per_microbatch=10_000)
    one_by_one = gradient(model_dir, SAMPLES, spec, max_tokens_per_microbatch=1)
    assert np.linalg.norm(whole) > 0
    assert relative_distance(one_by_one, whole) <= 1e-5


def test_the_mean_of_sequence_means_equals_plain_torch(model_dir: Path):
    found = gradient(model_dir, SAMPLES, LossSpec(aggregation="sequence_mean"))
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    # The mean over trajectories of each one's own token mean.
    loss = torch.stack([plain_loss(model, [sample]) for sample in SAMPLES]).mean()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert relative_distance(np.sort(found), np.sort(expected.numpy())) <= 1e-5


def test_importance_weights_multiply_the_policy_loss(model_dir: Path):
    spec = LossSpec(policy_loss="reinforce")
    twice = [
        dataclasses.replace(s, importance_weights=np.full(s.num_tokens, 2.0, np.float32))
        for s in SAMPLES
    ]
    plain = gradient(model_dir, SAMPLES, spec)
    assert relative_distance(gradient(model_dir, twice, spec), 2 * plain) <= 1e-5


def test_the_critic_equals_plain_torch(model_dir: Path):
    samples = with_values(SAMPLES)
    engine = make_engine(model_dir, critic=True)
    assert not any(values.any() for values in engine.token_values(samples))  # the head starts at 0
    before = engine.token_logprobs(samples)
    found = [
        engine.train_batch(samples, LossSpec(trains_policy=False, value_clip=0.5)) for _ in range(2)
    ]
    after = engine.token_logprobs(samples)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)  # the warm-up leaves the policy alone

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    head = torch.nn.Linear(model.config.hidden_size, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    parameters = [*model.model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=two_ranks.CRITIC_LR, weight_decay=0.0)
    for metrics in found:
        optimizer.zero_grad()
        total = torch.zeros(())
        for sample in samples:
            assert sample.old_values is not None
            assert sample.returns is not None
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))
            hidden = model.model(ids[None]).last_hidden_state[0, :-1]
            mask = torch.from_numpy(sample.loss_mask[1:])
            values = head(hidden)[mask, 0]
            old = torch.from_numpy(sample.old_values[1:])[mask]
            returns = torch.from_numpy(sample.returns[1:])[mask]
            near = old + (values - old).clamp(-0.5, 0.5)
            total = (
                total + 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()
            )
        loss = total / sum(int(sample.loss_mask.sum()) for sample in samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        assert metrics["loss/value"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad/critic_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_an_exported_critic_has_the_values_of_the_engine(model_dir: Path, tmp_path: Path):
    samples = with_values(SAMPLES)
    engine = make_engine(model_dir, critic=True)
    for _ in range(2):
        engine.train_batch(samples, LossSpec(trains_policy=False))
    engine.save_state(tmp_path / "state")
    (tmp_path / "critic").mkdir()
    table = ModelConfig(path=str(model_dir), dtype="float32", max_context=512)
    export_critic(tmp_path / "critic", table, tmp_path / "state" / CRITIC_FILE)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    for sample, values in zip(samples, engine.token_values(samples), strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            found = model(ids[None]).logits[0, :-1, 0].numpy()
        mask = sample.loss_mask[1:]
        assert values.any()
        np.testing.assert_allclose(found[mask], values[1:][mask], atol=1e-5)


def test_a_critics_checkpoint_is_not_read_by_an_engine_with_another_make_up(
    model_dir: Path, tmp_path: Path
):
    without = make_engine(model_dir)
    without.save_state(tmp_path / "state")
    with pytest.raises(ValueError, match="a critic = None and this run has a critic = True"):
        make_engine(model_dir, critic=True).load_state(tmp_path / "state")


def idle_half() -> list[TrainSample]:
    """The samples, with no advantage in the first four of seven."""
    idle = [dataclasses.replace(s, advantages=0 * s.advantages) for s in SAMPLES[:4]]
    return [*idle, *SAMPLES[4:]]


def test_dropping_zero_advantages_does_not_change_the_gradient(model_dir: Path):
    kept = gradient(model_dir, idle_half(), LossSpec(drop_zero_advantages=False))
    dropped = gradient(model_dir, idle_half(), LossSpec(drop_zero_advantages=True))
    assert relative_distance(dropped, kept) <= 1e-5
    nothing = gradient(model_dir, idle_half()[:4], LossSpec())
    assert np.count_nonzero(nothing) == 0


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_dropping_zero_advantages_does_not_change_a_metric(
    model_dir: Path, policy_loss: str, steps: int
):
    found: list[dict[str, float]] = []
    for drops in (False, True):
        spec = LossSpec(policy_loss=policy_loss, optimizer_steps=steps, drop_zero_advantages=drops)
        metrics = make_engine(model_dir).train_batch(idle_half(), spec)
        tokens = sum(s.num_tokens for s in SAMPLES[:4]) / sum(s.num_tokens for s in SAMPLES)
        share = metrics.pop("batch/forward_only_share")
        assert share == pytest.approx(tokens if drops else 0.0)
        for name in list(metrics):
            if name.startswith(("time/", "tokens_per_s", "batch/padding", "batch/microbatches")):
                del metrics[name]
        found.append(metrics)
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def loss_with_a_gradient_everywhere(inputs: LossInputs, options: LossOptions) -> PolicyLoss:
    """REINFORCE with every advantage raised by 1."""
    never = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    loss = -(inputs.advantages + 1) * inputs.logprobs
    return PolicyLoss(loss, never, torch.ones_like(inputs.logprobs))


def test_a_loss_of_the_users_keeps_its_gradient_where_advantages_are_zero(model_dir: Path):
    name = f"{__name__}:{loss_with_a_gradient_everywhere.__name__}"
    kept = gradient(model_dir, idle_half(), LossSpec(policy_loss=name, drop_zero_advantages=False))
    found = gradient(model_dir, idle_half(), LossSpec(policy_loss=name))
    assert relative_distance(found, kept) <= 1e-5


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_the_clip_fraction_is_the_share_of_tokens_whatever_the_aggregation(
    model_dir: Path, aggregation: Aggregation
):
    own = make_engine(model_dir).token_logprobs(SAMPLES)
    # Ratios of exp(1) with an advantage of 1 are above the bound, in two of seven samples; 1 in the
    # others is within.
    samples = [
        dataclasses.replace(
            sample,
            advantages=np.where(sample.loss_mask, 1.0, 0.0).astype(np.float32),
            rollout_logprobs=(logprobs - (i < 2)).astype(np.float32),
        )
        for i, (sample, logprobs) in enumerate(zip(SAMPLES, own, strict=True))
    ]
    tokens = [int(sample.loss_mask.sum()) for sample in samples]
    spec = LossSpec(aggregation=aggregation, fixed_length=100)
    metrics = make_engine(model_dir).train_batch(samples, spec)
    assert metrics["loss/clip_fraction"] == pytest.approx(sum(tokens[:2]) / sum(tokens))


@pytest.mark.parametrize("steps", [2, 3, 7, 20])
def test_optimizer_steps_without_a_trained_token_are_skipped_and_counted(
    model_dir: Path, caplog: pytest.LogCaptureFixture, steps: int
):
    engine = make_engine(model_dir)
    # The first four of seven are left out: of 2 steps (3 and 4 samples) one, of 3 (2, 2 and 3) two,
    # of 7 (1 each) four; and 20 become 7.
    taken = {2: 1, 3: 1, 7: 3, 20: 3}[steps]
    samples = two_ranks.left_out(SAMPLES, 4)
    for _ in range(2):
        metrics = engine.train_batch(samples, LossSpec(optimizer_steps=steps))
        assert metrics["batch/optimizer_steps"] == taken
        assert metrics["batch/skipped_optimizer_steps"] == steps - taken
    assert engine.optimizer_steps == 2 * taken
    assert [r.message for r in caplog.records if "optimizer steps skipped" in r.message] != []
    assert len([r for r in caplog.records if "optimizer steps skipped" in r.message]) == 1


def test_a_batch_that_filters_left_empty_changes_nothing(model_dir: Path):
    engine = make_engine(model_dir)
    before = engine.token_logprobs(SAMPLES)
    metrics = engine.train_batch(two_ranks.left_out(SAMPLES, 7), LossSpec(optimizer_steps=2))
    assert metrics["batch/optimizer_steps"] == 0
    assert metrics["batch/trained_tokens"] == 0
    assert "loss/total" not in metrics
    for one, other in zip(before, engine.token_logprobs(SAMPLES), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_skipped_step_keeps_its_place_in_the_schedule(model_dir: Path):
    engine = make_engine(model_dir, total_steps=4, lr=1.0, lr_schedule="linear")
    spec = LossSpec(optimizer_steps=2)
    # Four steps are planned: 1, 2/3, 1/3 and 0. The third is skipped; the last is the fourth.
    engine.train_batch(SAMPLES, dataclasses.replace(spec, steps_before=0))
    metrics = engine.train_batch(
        two_ranks.left_out(SAMPLES, 4), dataclasses.replace(spec, steps_before=2)
    )
    assert metrics["batch/optimizer_steps"] == 1
    assert metrics["lr"] == pytest.approx(0.0)


def test_the_critic_follows_the_schedule_from_its_own_rate(model_dir: Path):
    engine = make_engine(
        model_dir,
        critic=True,
        lr_schedule="linear",
        total_steps=5,
        lr=1e-3,
        critic_warmup_steps=2,
    )
    samples = with_values(SAMPLES)
    found = [
        engine.train_batch(samples, LossSpec(trains_policy=step >= 2, steps_before=step))
        for step in range(5)
    ]
    # The critic falls over 5 steps, the policy over the 3 that it is trained in.
    expected = [two_ranks.CRITIC_LR * (1 - step / 4) for step in range(5)]
    assert [m["learn/critic_lr"] for m in found] == pytest.approx(expected)
    assert [m.get("lr") for m in found] == [None, None, *map(pytest.approx, (1e-3, 5e-4, 0.0))]


def test_activation_checkpointing_does_not_change_the_gradient(model_dir: Path):
    plain = gradient(model_dir, SAMPLES, LossSpec())
    checkpointed = gradient(model_dir, SAMPLES, LossSpec(), activation_checkpointing=True)
    assert relative_distance(checkpointed, plain) <= 1e-5


def test_only_loss_mask_tokens_carry_gradient(model_dir: Path):
    """Values at masked positions are never read."""
    noise = [
        dataclasses.replace(
            s,
            rollout_logprobs=np.where(s.loss_mask, s.rollout_logprobs, -3).astype(np.float32),
            advantages=np.where(s.loss_mask, s.advantages, 100).astype(np.float32),
        )
        for s in SAMPLES
    ]
    clean = gradient(model_dir, SAMPLES, LossSpec())
    assert np.array_equal(gradient(model_dir, noise, LossSpec()), clean)


def test_logprobs_equal_log_softmax(model_dir: Path):
    engine = make_engine(model_dir)
    sequences = [sample.token_ids for sample in SAMPLES]
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    for ids, found in zip(sequences, sequence_logprobs(engine, sequences, 0.7), strict=True):
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None]).logits[0] / 0.7, -1)
        expected = log_p[:-1].gather(1, tokens[1:, None])[:, 0]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_predictions_have_log_probabilities_and_entropies_of_the_trained_tokens(model_dir: Path):
    engine = make_engine(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    found = engine.predictions(SAMPLES)
    for sample, own, logprobs in zip(SAMPLES, found, engine.token_logprobs(SAMPLES), strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(
                model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
                / sample.temperature,
                -1,
            )
        entropies = np.zeros(sample.num_tokens, np.float32)
        entropies[1:] = -(log_p.exp() * log_p).sum(-1)[:-1].numpy()
        np.testing.assert_allclose(own.entropies, entropies * sample.loss_mask, atol=1e-5)
        np.testing.assert_array_equal(own.logprobs, logprobs)


def test_the_ratio_starts_at_the_learners_own_logprobs_where_a_sample_has_them(model_dir: Path):
    """The first part's ratio is 1, whatever the rollout's log-probabilities were."""
    engine = make_engine(model_dir, lr=1e-6)
    own = engine.token_logprobs(SAMPLES)
    samples = [dataclasses.replace(s, old_logprobs=o) for s, o in zip(SAMPLES, own, strict=True)]
    metrics = engine.train_batch(samples, LossSpec(optimizer_steps=2))
    assert engine.optimizer_steps == 2
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-2)
    assert metrics["loss/clip_fraction"] == 0.0
    # The second step's weights are no longer those that are compared with the rollout's.
    assert "logprob/abs_diff_mean" not in metrics


def test_log_probabilities_are_compared_with_the_rollouts_over_all_trained_tokens(model_dir: Path):
    engine = make_engine(model_dir)
    own = engine.token_logprobs(SAMPLES)
    differences = np.concatenate(
        [np.abs(o - s.rollout_logprobs)[s.loss_mask] for o, s in zip(own, SAMPLES, strict=True)]
    )
    metrics = engine.train_batch(idle_half(), LossSpec())
    assert metrics["logprob/abs_diff_mean"] == pytest.approx(differences.mean(), rel=1e-4)
    assert metrics["logprob/abs_diff_max"] == pytest.approx(differences.max(), rel=1e-4)


def test_a_tied_model_stays_tied(tmp_path: Path):
    model_dir = save_model(tmp_path / "tied", tied=True)
    engine = make_engine(model_dir)
    engine.train_batch(SAMPLES, LossSpec())
    manifest = write_version(engine, tmp_path / "v1", "run", 1)
    aliases = {e.name: e.alias_of for e in manifest.tensors if e.alias_of}
    assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    engine.export_model(tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    before = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(exported.lm_head.weight, before)
    ids = SAMPLES[0].token_ids
    again = sequence_logprobs(make_engine(tmp_path / "out"), [ids])[0]
    np.testing.assert_allclose(again, sequence_logprobs(engine, [ids])[0], atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "stage"), [("float32", 0), ("float32", 3), *(("bfloat16", n) for n in (1, 2, 3))]
)
def test_a_resumed_engine_goes_on_as_if_nothing_had_happened(
    model_dir: Path, tmp_path: Path, dtype: str, stage: int
):
    settings = {"dtype": dtype, "zero_stage": stage}
    straight = make_engine(model_dir, **settings)
    losses = [straight.train_batch(SAMPLES, LossSpec())["loss/total"] for _ in range(3)]
    first = make_engine(model_dir, **settings)
    first.train_batch(SAMPLES, LossSpec())
    first.save_state(tmp_path / "state")
    resumed = make_engine(model_dir, **settings)
    resumed.load_state(tmp_path / "state")
    assert resumed.optimizer_steps == 1
    again = [resumed.train_batch(SAMPLES, LossSpec())["loss/total"] for _ in range(2)]
    assert again == losses[1:]

    file = tmp_path / "state" / "policy.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=rf"{file.name} is corrupted: its checksum differs"):
        resumed.load_state(tmp_path / "state")


def test_a_bad_batch_is_refused_and_the_engine_goes_on(model_dir: Path):
    engine = make_engine(model_dir)
    unmasked = [dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in SAMPLES]
    with pytest.raises(ValueError, match="none of the tokens of 7 samples counts"):
        engine.train_batch(unmasked, LossSpec(kind="nll"))
    assert engine.train_batch(SAMPLES, LossSpec())["tokens_per_s"] > 0


def test_a_gradient_that_is_not_finite_ends_training_before_the_weights_change(model_dir: Path):
    table = EngineConfig.model_validate(two_ranks.SETTINGS)
    group = RankGroup(EngineSetup.of(ModelConfig(path=str(model_dir), max_context=512), table))
    engine = make_engine(model_dir, group=group)
    before = sequence_logprobs(engine, [SAMPLES[0].token_ids])[0]
    endless = [
        dataclasses.replace(s, advantages=np.where(s.loss_mask, np.inf, 0).astype(np.float32))
        for s in SAMPLES
    ]
    named = [dataclasses.replace(s, name=f"run/0/{i}") for i, s in enumerate(endless)]
    with pytest.raises(EngineError, match=r"not finite, so step 1 was refused.* run/0/0, run/0/1"):
        engine.train_batch(named, LossSpec())
    with pytest.raises(EngineError, match="the training engine ended"):
        engine.train_batch(SAMPLES, LossSpec())
    # the engine takes no further call, so its one rank is asked
    batch = build_microbatch([scoring_sample(SAMPLES[0].token_ids, 1.0)], [0], layout="shared")
    found, _entropies = group.engine.score(("policy", [batch]))[0]
    np.testing.assert_array_equal(found, before)


def exhausting_loss(inputs: LossInputs, options: LossOptions) -> PolicyLoss:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")


def test_running_out_of_memory_names_the_keys_in_order(model_dir: Path):
    engine = make_engine(model_dir)
    keys = (
        r"max_tokens_per_microbatch \(64\).*activation_checkpointing.*offload.*model\.max_context"
    )
    spec = LossSpec(policy_loss=f"{__name__}:{exhausting_loss.__name__}")
    with pytest.raises(EngineError, match=rf"out of memory on cpu.*engine\.{keys}"):
        engine.train_batch(SAMPLES, spec)
