"""What ranks tell each other: declared types, arrays as they were, nothing that is code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from agent_r1.learner.config import Layout
from agent_r1.learner.engine.interface import LossSpec
from agent_r1.learner.engine.layout import build_microbatch, build_value_batch
from agent_r1.learner.engine.ranks.messages import OptimizerStep, RankBatch
from agent_r1.learner.engine.ranks.wire import decode, encode
from tests.support.tiny_models import make_samples, with_values


def same(one: Any, other: Any) -> bool:
    """Equality of messages, their arrays' dtypes included."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and all(
            same(value, getattr(other, name)) for name, value in vars(one).items()
        )
    return one == other


@pytest.mark.parametrize("layout", get_args(Layout))
def test_a_batch_arrives_as_it_was_sent(layout: Layout):
    samples = with_values(make_samples(4, seed=1))
    batches = [
        build_microbatch(samples, indices, layout=layout) for indices in ([0, 2], [1], [], [3])
    ]
    values = [build_value_batch(samples, [0, 1], layout=layout)]
    spec = LossSpec(kl_coef=0.1, clip_high=0.28, value_clip=None)
    # 1/3 has no short decimal form: it must come through all the same.
    step = OptimizerStep(batches[:2], 1 / 3, batches[2:], values, 3e-3)
    sent = RankBatch(spec, [step, OptimizerStep([], None)])
    name, got = decode(*encode("train", sent))
    assert name == "train"
    assert same(sent, got)
    assert same(decode(*encode("score", ("reference", batches)))[1], ("reference", batches))


def test_results_paths_and_commands_without_an_argument_arrive():
    results = [np.array([0.5, -2.0], np.float32), np.zeros(0, np.float32)]
    assert same(decode(*encode("results", results)), ("results", results))
    assert decode(*encode("save", Path("/runs/a"))) == ("save", Path("/runs/a"))
    assert decode(*encode("collect", None)) == ("collect", None)


@pytest.mark.parametrize(
    ("name", "body", "arrays"),
    [
        ("save", '{"__reduce__": "os.system"}', []),  # no path
        ("results", "[0]", [("int64", [1])]),  # another dtype than declared
        ("train", "[0]", [("float32", [2])]),  # no RankBatch
    ],
)
def test_what_has_another_form_than_declared_is_refused(name: str, body: str, arrays: list[Any]):
    header = json.dumps([name, body, arrays]).encode()
    with pytest.raises(ValueError, match="validation error"):
        decode(header, bytes(8))


def test_a_command_that_is_not_declared_is_refused():
    with pytest.raises(KeyError, match="__init__"):
        decode(json.dumps(["__init__", "null", []]).encode(), b"")
