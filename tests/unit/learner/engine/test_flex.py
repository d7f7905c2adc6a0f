"""FlexAttention of packed and shared rows: the mask, its blocks, and what comes out."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig

from agent_r1.learner.config import Layout
from agent_r1.learner.engine import attention, flex
from agent_r1.learner.engine.attention import attend, check_kernel, plan_attention
from agent_r1.learner.engine.flex import BLOCK_ROWS, flex_attend, last_rows, plan_flex
from agent_r1.learner.engine.layout import build_microbatch
from agent_r1.learner.engine.microbatches import scoring_sample
from agent_r1.learner.engine.ranks.messages import MicroBatch
from tests.support.flex import use_flex_on_cpu

CPU = torch.device("cpu")
HEADS, GROUPS, SIZE = 6, 2, 16


@pytest.fixture
def _flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_flex_on_cpu(monkeypatch)


def lay_out(trajectories: Sequence[Sequence[int]], layout: Layout) -> MicroBatch:
    samples = [scoring_sample(np.array(ids, np.int32), 1.0) for ids in trajectories]
    return build_microbatch(samples, range(len(samples)), layout=layout)


def rows_of(batch: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
    assert batch.paths is not None
    assert batch.spans is not None
    return batch.paths, batch.spans


def random_tree(seed: int) -> list[list[int]]:
    """Trajectories of up to 300 tokens, in order; most begin like another, some equal one."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(0, 9, rng.integers(1, 300)).tolist() for _ in range(2)]
    for _ in range(5):
        parent = made[rng.integers(len(made))]
        kept = int(rng.integers(1, len(parent) + 1))
        made.append(parent[:kept] + rng.integers(0, 9, rng.integers(0, 150)).tolist())
    return sorted(made)


def test_a_row_is_seen_until_what_continues_it_ends():
    # Rows 0 1 2 3, then 4 after row 1, then 5 6; the second trajectory is the first one again.
    paths = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 4, 5, 6])
    spans = np.array([[0, 4], [4, 4], [2, 3], [0, 2]])
    assert last_rows(paths, spans).tolist() == [5, 5, 4, 4, 5, 7, 7]


def computed(mask: BlockMask) -> tuple[int, int]:
    """How many blocks are computed with the mask, and without."""
    assert mask.full_kv_num_blocks is not None
    return int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())


def test_blocks_that_nothing_sees_are_left_out():
    # Four trajectories of two blocks each: of 8 x 8 blocks, three each; one below the diagonal is
    # seen whole. A mask that is only causal has 36.
    packed = lay_out([[i] * 256 for i in range(4)], "packed")
    assert computed(plan_flex(*rows_of(packed), CPU)) == (8, 4)
    # A prompt of two blocks and three answers of one: 1 + 2 blocks of the prompt, and for each
    # answer the prompt and itself: 12 of 5 x 5. Packed, it would be 3 x (1 + 2 + 3) = 18.
    group = [[0] * 256 + [answer] * 128 for answer in (1, 2, 3)]
    assert computed(plan_flex(*rows_of(lay_out(group, "shared")), CPU)) == (5, 7)
    assert computed(plan_flex(*rows_of(lay_out(group, "packed")), CPU)) == (9, 9)


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("seed", range(6))
def test_the_blocks_are_those_of_the_whole_mask(seed: int, layout: Layout):
    paths, spans = rows_of(lay_out(random_tree(seed), layout))
    mask = plan_flex(paths, spans, CPU)
    sees = np.zeros(mask.shape[-2:], np.bool_)
    for path in np.split(paths, np.cumsum(spans[:-1, 1])):
        sees[path[:, None], path] |= np.tri(len(path), dtype=np.bool_)
    whole = torch.from_numpy(sees)
    rows = len(sees)
    expected = create_block_mask(lambda _b, _h, q, k: whole[q, k], None, None, rows, rows, CPU)
    places = torch.arange(rows)
    found = mask.mask_mod(places, places, places[:, None], places[None])
    assert torch.equal(found, whole)
    for part in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(mask, f"{part}_num_blocks")
        assert torch.equal(counts, getattr(expected, f"{part}_num_blocks"))
        ours, theirs = getattr(mask, f"{part}_indices"), getattr(expected, f"{part}_indices")
        used = torch.arange(ours.shape[-1]) < counts[..., None]
        assert torch.equal(ours[used], theirs[used])


def states(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of what is found."""
    torch.manual_seed(0)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    return [torch.randn(1, count, rows, SIZE).to(dtype) for count in heads]


def with_gradients(batch: MicroBatch, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What `attend` finds, and the gradients of queries, keys and values."""
    asked = query, key, value = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
    plan = plan_attention(*rows_of(batch), CPU)
    found, _ = attend(nn.Identity(), query, key, value, None, scaling=0.3, plan=plan)
    return found.detach(), *torch.autograd.grad(found, asked, inputs[3].transpose(1, 2))


def each_alone(batch: MicroBatch, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same of every trajectory by itself, in float64; a shared row is asked for once."""
    paths, spans = rows_of(batch)
    query, key, value = (tensor.double().clone().requires_grad_() for tensor in inputs[:3])
    found = torch.zeros(inputs[0].shape, dtype=torch.float64)
    for path, own in zip(np.split(paths, np.cumsum(spans[:-1, 1])), spans[:, 0], strict=True):
        one, repeat = query[:, :, path], HEADS // GROUPS
        answer = functional.scaled_dot_product_attention(
            one,
            key[:, :, path].repeat_interleave(repeat, 1),
            value[:, :, path].repeat_interleave(repeat, 1),
            is_causal=True,
            scale=0.3,
        )
        found = found.index_copy(2, torch.from_numpy(path[own:]), answer[:, :, own:])
    gradients = torch.autograd.grad(found, (query, key, value), inputs[3].double())
    return found.detach().transpose(1, 2), *gradients


def distances(ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[float]:
    pairs = zip(ours, expected, strict=True)
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_each_trajectory_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layout: Layout
):
    batch = lay_out(random_tree(1), layout)
    inputs = states(batch.num_padded, dtype)
    assert batch.num_padded % BLOCK_ROWS != 0  # the last block is not whole
    expected = each_alone(batch, inputs)
    blocks = distances(with_gradients(batch, inputs), expected)
    use_flex_on_cpu(monkeypatch)
    ours = distances(with_gradients(batch, inputs), expected)
    # bfloat16 has 8 bits: rounding leaves up to 1/256 of each number, and 0.4/256 of the norm. The
    # weights of the keys are rounded once, and what comes out once more.
    most = 1e-6 if dtype == torch.float32 else 1.5 / 256
    assert max(blocks) <= most
    assert max(ours) <= most


@pytest.mark.usefixtures("_flex_on_cpu")
def test_few_rows_and_cpus_have_no_kernel():
    few = lay_out([[1] * 60, [2] * 68], "packed")
    assert not isinstance(plan_attention(*rows_of(few), CPU), BlockMask)
    more = lay_out([[1] * 60, [2] * 69], "packed")
    assert isinstance(plan_attention(*rows_of(more), CPU), BlockMask)


def test_a_cpu_takes_blocks_of_trajectories_and_a_gpu_the_mask():
    assert flex.uses_flex(torch.device("cuda", 0), BLOCK_ROWS + 1)
    assert not flex.uses_flex(torch.device("cuda", 0), BLOCK_ROWS)
    assert not flex.uses_flex(CPU, BLOCK_ROWS + 1)


def test_one_kernel_serves_every_number_of_rows(monkeypatch: pytest.MonkeyPatch):
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    monkeypatch.setattr(flex, "_kernel", functools.cache(flex._kernel.__wrapped__))
    torch.compiler.reset()
    for lengths in ([100, 270], [1000, 100, 40], [129]):
        packed = lay_out([[i] * length for i, length in enumerate(lengths)], "packed")
        query, key, value, _ = states(packed.num_padded, torch.float32)
        flex_attend(query, key, value, plan_flex(*rows_of(packed), CPU), 0.3)
    assert len(graphs) == 1


def model_config(size: int) -> PretrainedConfig:
    config = PretrainedConfig()
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = HEADS, GROUPS, size
    return config


@pytest.mark.usefixtures("_flex_on_cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_computes_the_same_passes(dtype: torch.dtype):
    check_kernel(model_config(16), "shared", dtype, CPU)


@pytest.mark.usefixtures("_flex_on_cpu")
def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch):
    def causal(paths: np.ndarray, spans: np.ndarray, device: torch.device) -> BlockMask:
        rows = len(last_rows(paths, spans))
        return create_block_mask(lambda _b, _h, q, k: k <= q, None, None, rows, rows, device)

    monkeypatch.setattr(attention, "plan_flex", causal)
    expected = r"packing = true .* on cpu: results differ by .*; set engine\.packing = false"
    with pytest.raises(ValueError, match=expected):
        check_kernel(model_config(16), "packed", torch.bfloat16, CPU)


@pytest.mark.usefixtures("_flex_on_cpu")
def test_a_kernel_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"heads have size 8, and the least is 16; set engine"):
        check_kernel(model_config(8), "shared", torch.float32, CPU)

    def broken(*_tensors: object, **_options: object) -> torch.Tensor:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(flex, "_kernel", lambda: broken)
    with pytest.raises(ValueError, match=re.escape("no C compiler; set engine.share_prefixes")):
        check_kernel(model_config(16), "shared", torch.float32, CPU)


def test_nothing_is_checked_where_there_is_no_kernel():
    check_kernel(model_config(8), "shared", torch.float32, CPU)
