"""Rank 0 of a learner of two ranks, for test_two_ranks.py: prints one JSON line per answer.

    python -m tests.support.two_ranks short|compare|lora|lose|fail|outlive|stall|end MODEL_DIR

`compare` trains under every ZeRO stage and prints what came out, then waits to be killed; `short`
takes the first and the last stage, `lora` all of them with adapters.
`lose` ends rank 1 by kill -9, `fail` lets it raise, `outlive` has the test end it; they print what
calls raise from then on. `stall` loses rank 1 in a call that does not come back. `end` trains a
batch and ends in order.

Started alone it starts rank 1; started with the variables of a launcher it is the rank they say.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_r1.runtime.imports import quick_imports

with quick_imports():
    import numpy as np
    import torch

    from agent_r1.learner.algorithms.losses import LossInputs, LossOptions, PolicyLoss
    from agent_r1.learner.config import EngineConfig
    from agent_r1.learner.engine.interface import EngineError, LossSpec, TrainSample
    from agent_r1.learner.engine.microbatches import plan_microbatches, scoring_sample
    from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
    from agent_r1.learner.engine.ranks import group as ranks_group
    from agent_r1.learner.engine.ranks.group import RankGroup
    from agent_r1.learner.engine.ranks.messages import CriticSetup, EngineSetup
    from agent_r1.learner.engine.ranks.rank_env import RankPlace, read_place
    from agent_r1.learner.engine.ranks.worker import follow
    from agent_r1.runtime.config import LoraConfig, ModelConfig
    from tests.support.snapshot_files import write_version
from tests.support.tiny_models import make_samples, with_values

SEED = 11
COUNT = 7
STEPS = 3
CRITIC_LR = 3e-3
LORA = LoraConfig(rank=4)
STAGES = {"short": (0, 3), "compare": (0, 1, 2, 3), "lora": (0, 1, 2, 3)}
"""ZeRO stages that a mode compares."""
STALL_GRACE_S = 1.0
SPEC = LossSpec(kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0)
FILTERED_METRICS = ("loss/total", "loss/value", "grad_norm", "batch/optimizer_steps")
SETTINGS: dict[str, Any] = {
    "lr": 1e-3,
    "max_tokens_per_microbatch": 64,
    "max_padding_share": 0.3,
    "logprob_chunk_tokens": 16,
    "device": "cpu",
}
# AdamW's first step is lr * g / (|g| + eps): with such an eps, 1e6 times the gradient.
SHOWS_GRADIENT: dict[str, Any] = {"max_grad_norm": 1e9, "adam_eps": 1e6, "lr": 1e12}


def answer_line(values: dict[str, Any]) -> None:
    """Print one answer."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def gradient(
    engine: DeepSpeedPolicyEngine, samples: list[TrainSample], spec: LossSpec
) -> np.ndarray:
    """Return the gradient of one batch, from what an engine with `SHOWS_GRADIENT` makes of it."""
    before = weights(engine)
    engine.train_batch(samples, spec)
    return (before - weights(engine)) / 1e6


def weights(engine: DeepSpeedPolicyEngine) -> np.ndarray:
    """Return all weights in the order of their names, as they are pushed."""
    tensors = engine.weights().tensors
    return np.concatenate([tensors[n].double().flatten().numpy() for n in sorted(tensors)])


def left_out(samples: list[TrainSample], count: int) -> list[TrainSample]:
    """Leave the first `count` samples out of the policy's loss, as a filter does."""
    nothing = [dataclasses.replace(s, loss_mask=s.loss_mask & False) for s in samples[:count]]
    return [*nothing, *samples[count:]]


def state_of_one(model_dir: Path, stage: int) -> Path:
    """Return where one rank leaves its state under a stage."""
    return model_dir.parent / f"one_rank_{stage}" / "state"


def state_of_two(model_dir: Path, stage: int) -> Path:
    """Return where two ranks leave theirs."""
    return model_dir.parent / f"two_ranks_{stage}" / "state"


def train_and_save(engine: DeepSpeedPolicyEngine, state: Path) -> None:
    """Train up to where `train` saves."""
    samples = with_values(make_samples(COUNT, seed=SEED))
    for _ in range(STEPS - 1):
        engine.train_batch(samples, SPEC)
    engine.save_state(state)


def go_on(engine: DeepSpeedPolicyEngine) -> dict[str, list[float]]:
    """Train two more batches: the second shows what the optimizer remembered in the first."""
    samples = with_values(make_samples(COUNT, seed=SEED))
    metrics = [engine.train_batch(samples, SPEC) for _ in range(2)]
    return {name: [values[name] for values in metrics] for name in ("loss/total", "loss/value")}


def sequence_logprobs(
    engine: DeepSpeedPolicyEngine, token_ids: list[Any], temperature: float = 1.0
) -> list[Any]:
    """[T-1] log-probability of token t+1 given tokens 0..t, per sequence."""
    samples = [scoring_sample(ids, temperature) for ids in token_ids]
    return [values[1:] for values in engine.token_logprobs(samples)]


def train(engine: DeepSpeedPolicyEngine, folder: Path) -> dict[str, Any]:
    """Train a few steps, save in the middle and repeat the last step from there."""
    samples = with_values(make_samples(COUNT, seed=SEED))
    metrics = [engine.train_batch(samples, SPEC) for _ in range(STEPS - 1)]
    engine.save_state(folder / "state")
    metrics.append(engine.train_batch(samples, SPEC))
    engine.load_state(folder / "state")
    again = engine.train_batch(samples, SPEC)
    manifest = write_version(engine, folder / "snapshot", "run", 1)
    logprobs = sequence_logprobs(engine, [sample.token_ids for sample in samples])
    filtered = engine.train_batch(
        left_out(samples, COUNT // 2), dataclasses.replace(SPEC, optimizer_steps=2)
    )
    nothing = engine.train_batch(
        left_out(make_samples(COUNT, seed=SEED), COUNT),
        dataclasses.replace(SPEC, optimizer_steps=2),
    )
    return {
        "losses": [values["loss/total"] for values in metrics],
        "grad_norms": [values["grad_norm"] for values in metrics],
        "kl": [values["loss/kl_ref"] for values in metrics],
        "value_losses": [values["loss/value"] for values in metrics],
        "values": np.concatenate(engine.token_values(samples)).tolist(),
        "repeated_loss": again["loss/total"],
        "repeated_value_loss": again["loss/value"],
        "steps": engine.optimizer_steps,
        "filtered": [filtered[name] for name in FILTERED_METRICS],
        "nothing": nothing["batch/optimizer_steps"],
        "logprobs": np.concatenate(logprobs).tolist(),
        "tensors": sorted((entry.name, entry.alias_of or "") for entry in manifest.tensors),
    }


def setups(model_dir: Path, mode: str = "end") -> list[EngineSetup]:
    """Return what both ranks build, in order: a probe of the gradient, then every stage."""
    lora = LORA if mode == "lora" else None
    model = ModelConfig(path=str(model_dir), max_context=512, lora=lora)
    critic = CriticSetup(model, CRITIC_LR)
    found: list[EngineSetup] = []
    for stage in STAGES.get(mode, ()):
        more = {"zero_stage": stage, "activation_checkpointing": stage == 3}
        table = EngineConfig.model_validate({**SETTINGS, "ranks": 2, **more})
        found.append(EngineSetup.of(model, table, with_reference=True, critic=critic))
    plain = EngineConfig.model_validate({**SETTINGS, "ranks": 2, **SHOWS_GRADIENT})
    return [EngineSetup.of(model, plain, with_reference=True), *found]


def compare(model_dir: Path, place: RankPlace, mode: str) -> None:
    """Train under every stage on the same two ranks."""
    probe_setup, *others = setups(model_dir, mode)
    group = RankGroup(probe_setup, place)
    answer_line({"workers": [process.pid for process in group.workers]})
    lengths = [sample.num_tokens for sample in make_samples(COUNT, seed=SEED)]
    shares = plan_microbatches(lengths, 2, 64, 0.3)
    probe = DeepSpeedPolicyEngine(probe_setup, group=group)
    found = gradient(probe, make_samples(COUNT, seed=SEED), SPEC).tolist()
    answer_line({"microbatches": len(shares[0]), "gradient": found})
    for setup in others:
        engine = DeepSpeedPolicyEngine(setup, group=group)
        stage = setup.config.zero_stage
        answer = {"stage": stage} | train(engine, state_of_two(model_dir, stage).parent)
        engine.load_state(state_of_one(model_dir, stage))
        answer_line(answer | {"resumed": go_on(engine)})
    answer_line({"done": True})
    sys.stdin.read()


def report_errors(
    model_dir: Path,
    place: RankPlace,
    damage: Callable[[RankGroup, Callable[[LossSpec], object]], object],
) -> None:
    """Damage an engine of two ranks; print what it raises then, and how rank 1 ended."""
    setup = setups(model_dir)[0]
    group = RankGroup(setup, place)
    engine = DeepSpeedPolicyEngine(setup, group=group)
    samples = make_samples(COUNT, seed=SEED)
    engine.train_batch(samples, LossSpec())

    def train_on(spec: LossSpec) -> object:
        return engine.train_batch(samples, spec)

    calls = [lambda: damage(group, train_on), lambda: train_on(LossSpec())]
    errors: list[str] = []
    for call in [*calls, calls[-1]]:
        try:
            call()
        except EngineError as exc:
            errors.append(str(exc))
    engine.close()
    codes = [process.returncode for process in group.workers]
    answer_line({"errors": errors, "exit_codes": codes})


def lose(model_dir: Path, place: RankPlace) -> None:
    """Lose rank 1 between two calls."""
    report_errors(model_dir, place, lambda group, _: os.kill(group.workers[0].pid, signal.SIGKILL))


def outlive(model_dir: Path, place: RankPlace) -> None:
    """Let the test end rank 1, which this process has not started."""

    def wait_for_the_test(*_: object) -> None:
        answer_line({"trained": True})
        sys.stdin.readline()

    report_errors(model_dir, place, wait_for_the_test)


def stall(model_dir: Path, place: RankPlace) -> None:
    """Lose rank 1 in a call of rank 0 that does not come back, as a collective may not."""
    ranks_group.FAILURE_GRACE_S = STALL_GRACE_S

    def stay_in_a_call(group: RankGroup, train_on: Callable[[LossSpec], object]) -> None:
        def never_comes_back(_: object) -> None:
            os.kill(group.workers[0].pid, signal.SIGKILL)
            threading.Event().wait()

        setattr(group.engine, "train", never_comes_back)  # noqa: B010
        train_on(LossSpec())

    report_errors(model_dir, place, stay_in_a_call)


def end(model_dir: Path, place: RankPlace) -> None:
    """Train one batch and end in order."""
    setup = setups(model_dir)[0]
    engine = DeepSpeedPolicyEngine(setup, group=RankGroup(setup, place))
    metrics = engine.train_batch(make_samples(COUNT, seed=SEED), LossSpec())
    engine.close()
    answer_line({"loss": metrics["loss/total"]})


def fails_on_rank_1(inputs: LossInputs, options: LossOptions) -> PolicyLoss:
    """A loss that raises on one of two ranks."""
    if torch.distributed.get_rank() == 1:
        raise ArithmeticError("this loss fails on rank 1")
    never = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    return PolicyLoss(-inputs.logprobs, never, torch.ones_like(inputs.logprobs))


def fail(model_dir: Path, place: RankPlace) -> None:
    """Let rank 1 alone raise, while rank 0 waits for it."""
    spec = LossSpec(policy_loss="tests.support.two_ranks:fails_on_rank_1")
    report_errors(model_dir, place, lambda _, train_on: train_on(spec))


def main(mode: str, model_dir: Path) -> None:
    """Lead, or follow where rank 0 has started this process."""
    place = read_place(os.environ, 2, "learner")
    if place.rank > 0:
        follow(place, setups(model_dir, mode))
    if mode in STAGES:
        compare(model_dir, place, mode)
    else:
        modes = {"lose": lose, "fail": fail, "outlive": outlive, "stall": stall, "end": end}
        modes[mode](model_dir, place)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
