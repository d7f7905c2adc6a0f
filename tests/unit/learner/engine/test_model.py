"""Chunked log-probabilities against log_softmax, and which tokens get gradient."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from agent_r1.learner.algorithms.losses import LossOptions
from agent_r1.learner.algorithms.losses.ppo import clipped_policy_loss
from agent_r1.learner.engine import head
from agent_r1.learner.engine.head import LogprobHead
from agent_r1.learner.engine.layout import build_microbatch
from agent_r1.learner.engine.model import PolicyModule, load_causal_model
from agent_r1.runtime.config import ModelConfig
from agent_r1.runtime.gpu_needs import Finding
from tests.support.tiny_models import VOCABULARY, build_model, make_samples, save_model


def reference_logprobs(
    hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies through one [N, V] log_softmax."""
    log_p = torch.log_softmax(head(hidden) / temperatures[:, None], dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_equal_one_log_softmax_in_value_and_gradient(chunk_tokens: int, bias: bool):
    torch.manual_seed(0)
    projection = nn.Linear(16, 40, bias=bias)
    targets = torch.randint(0, 40, (13,))
    temperatures = torch.linspace(0.5, 1.5, 13)
    weights = torch.randn(13)
    results = []
    for chunked in (True, False):
        torch.manual_seed(1)
        hidden = torch.randn(13, 16, requires_grad=True)
        projection.zero_grad()
        if chunked:
            found = LogprobHead(projection, chunk_tokens)(hidden, targets, temperatures)
        else:
            found = reference_logprobs(hidden, projection, targets, temperatures)
        (found[0] * weights + 0.3 * found[1] * weights.roll(1)).sum().backward()
        grads = [hidden.grad, *(parameter.grad for parameter in projection.parameters())]
        results.append([*found, *grads])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("entropy_share", [0.0, 0.3])
def test_what_gpus_compile_gives_the_same_values_and_gradients(
    entropy_share: float, monkeypatch: pytest.MonkeyPatch
):
    compile_graph = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_graph)  # without the kernels, for seconds less
    monkeypatch.setattr(head, "_compiled", functools.cache(head._compiled.__wrapped__))
    torch.manual_seed(0)
    projection = nn.Linear(16, 40, bias=False, dtype=torch.bfloat16)
    targets, temperatures = torch.randint(0, 40, (13,)), torch.linspace(0.5, 1.5, 13)
    results = []
    for for_device in (head._for_device, lambda function, _: head._compiled(function)):
        monkeypatch.setattr(head, "_for_device", for_device)
        torch.manual_seed(1)
        hidden = torch.randn(13, 16, dtype=torch.bfloat16, requires_grad=True)
        projection.zero_grad()
        # Chunks of 5, 5 and 3 tokens: one compiled function serves every length.
        logprobs, entropies = LogprobHead(projection, 5)(hidden, targets, temperatures)
        (logprobs.sum() + entropy_share * entropies.sum()).backward()
        results.append([logprobs, entropies, hidden.grad, projection.weight.grad])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


def test_what_cannot_be_compiled_is_computed_as_on_a_cpu_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(_graph: object, _inputs: object) -> None:
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=fail))
    score = head._compiled.__wrapped__(head._score)
    inputs = torch.randn(3, 40), torch.tensor([1, 2, 3]), torch.ones(3)
    for _ in range(2):
        for ours, expected in zip(score(*inputs), head._score(*inputs), strict=True):
            torch.testing.assert_close(ours, expected)
    (said,) = [one.message for one in caplog.records if "not compiled" in one.message]
    assert "no such GPU" in said


def test_without_a_compiler_a_gpu_computes_as_a_cpu_does_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(head, "check_compiler", lambda: Finding("C compiler", "none", "install it"))
    assert head._compiled.__wrapped__(head._score) is head._score
    assert "remedy=install it" in caplog.text


def test_no_positions_give_no_logprobs_and_zero_gradient():
    projection = nn.Linear(16, 40, bias=False)
    hidden = torch.randn(0, 16, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    logprobs, _ = LogprobHead(projection, 8)(hidden, targets, torch.ones(0))
    logprobs.sum().backward()
    assert projection.weight.grad is not None
    assert torch.count_nonzero(projection.weight.grad) == 0


def loss_and_gradients(
    module: PolicyModule, samples, groups: list[list[int]]
) -> tuple[float, list[torch.Tensor]]:
    """Sum of policy losses over micro-batches, with its gradient."""
    module.zero_grad()
    total = 0.0
    for indices in groups:
        batch = build_microbatch(samples, indices, layout="padded")
        logprobs, _ = module(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.targets),
            torch.from_numpy(batch.temperatures),
        )
        loss = clipped_policy_loss(
            logprobs,
            torch.from_numpy(batch.old_logprobs),
            torch.from_numpy(batch.advantages),
            LossOptions(clip_low=0.2, clip_high=0.2),
        ).loss.sum()
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in module.parameters() if p.grad is not None]


def relative_distance(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Norm of the difference over the norm of the expected gradient."""
    difference = torch.cat([(a - b).flatten() for a, b in zip(ours, expected, strict=True)])
    return float(difference.norm() / torch.cat([b.flatten() for b in expected]).norm())


@pytest.fixture(scope="module")
def module() -> PolicyModule:
    return PolicyModule(build_model(), chunk_tokens=7)


def test_padded_microbatches_equal_one_by_one_in_any_order(module: PolicyModule):
    samples = make_samples(6)
    loss, gradients = loss_and_gradients(module, samples, [[i] for i in range(6)])
    for groups in ([[0, 1, 2, 3, 4, 5]], [[5, 0], [2, 4, 3], [1]], [[3, 2, 1, 0, 5, 4], []]):
        other_loss, other = loss_and_gradients(module, samples, groups)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert relative_distance(other, gradients) <= 1e-5


def test_padding_does_not_change_logprobs(module: PolicyModule):
    samples = make_samples(4)
    with torch.no_grad():
        model = build_model()
        for indices in ([0, 1, 2, 3], [2]):
            batch = build_microbatch(samples, indices, layout="padded")
            found, _ = module(
                *map(
                    torch.from_numpy,
                    (batch.token_ids, batch.positions, batch.targets, batch.temperatures),
                )
            )
            expected = []
            for i in indices:
                ids = torch.from_numpy(samples[i].token_ids.astype(np.int64))
                logits = model(ids[None]).logits[0] / samples[i].temperature
                log_p = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
                expected.append(log_p[torch.from_numpy(samples[i].loss_mask[1:])])
            torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_a_masked_token_has_exactly_no_gradient(module: PolicyModule):
    """What an untrained token is cannot reach the loss unless a trained one comes after it."""
    first = make_samples(1)[0]
    last_trained = int(np.flatnonzero(first.loss_mask)[-1])
    ids = torch.from_numpy(first.token_ids.astype(np.int64))[None]
    tail = torch.randint(0, VOCABULARY, (1, 5))
    extended = torch.cat([ids[:, : last_trained + 1], tail], dim=1)
    embeddings = module.decoder.get_input_embeddings()(extended).detach().requires_grad_(True)
    hidden = module.decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    trained = np.flatnonzero(first.loss_mask)
    logprobs, _ = module.head(
        hidden[0, trained - 1], extended[0, trained], torch.ones(len(trained))
    )
    logprobs.sum().backward()
    assert embeddings.grad is not None
    # the last trained token itself and all after it are never inputs of a trained prediction
    assert torch.count_nonzero(embeddings.grad[0, last_trained:]) == 0
    assert torch.count_nonzero(embeddings.grad[0, :last_trained]) > 0


def test_a_masked_position_adds_nothing_to_the_head(module: PolicyModule):
    samples = make_samples(1)
    batch = build_microbatch(samples, [0], layout="padded")
    assert len(batch.positions) == int(samples[0].loss_mask.sum())
    assert set(batch.positions + 1) == set(np.flatnonzero(samples[0].loss_mask))


def test_a_missing_model_is_named(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"model\.path .*empty\) holds no config\.json"):
        load_causal_model(ModelConfig(path=str(tmp_path / "empty")))


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path):
    path = save_model(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        load_causal_model(ModelConfig(path=str(path), max_context=64))


def test_a_context_beyond_the_models_positions_is_an_error(tmp_path: Path):
    path = save_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model\.max_context \(1024\) exceeds the model's 512"):
        load_causal_model(ModelConfig(path=str(path), max_context=1024))


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path):
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logit_scale=0.0625,
        bos_token_id=0,
        eos_token_id=1,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model of type 'cohere' cannot be trained"):
        load_causal_model(ModelConfig(path=str(tmp_path), max_context=64))
