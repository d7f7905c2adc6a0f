"""The warm start for real: it learns, writes what it should, and survives being interrupted."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1.learner.config import SftConfig
from agent_r1.learner.sft import train as sft
from agent_r1.runtime.config import ModelConfig, RunConfig
from tests.support.tiny_models import save_model

STEPS = 12


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("sft") / "model")


@pytest.fixture(scope="module")
def data_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "demonstrations.jsonl"
    lines = []
    for i in range(24):
        name = "ABCDEFGH"[i % 8] * 3
        messages = [
            {"role": "user", "content": f"Who is {name}?"},
            {"role": "assistant", "content": f"<tool_call>{name}</tool_call>"},
            {"role": "tool", "content": f"{name} is well"},
            {"role": "assistant", "content": name},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return path


class StopAfter(threading.Event):
    """Is set when it is asked for the (steps + 1)-th time, or raises then."""

    def __init__(self, steps: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.left = steps
        self.error = error

    def is_set(self) -> bool:
        self.left -= 1
        if self.left < 0 and self.error is not None:
            raise self.error
        return self.left < 0


def run_sft(
    model_dir: Path,
    data: Path,
    output: Path,
    stop: threading.Event | None = None,
    lr: float = 5e-3,
    **settings: Any,
) -> bool:
    table = SftConfig.model_validate(
        {
            "data": [data],
            "output": output,
            "batch_sequences": 8,
            "epochs": 9,
            "steps": STEPS,
            "engine": {"lr": lr, "lr_schedule": "cosine", "device": "cpu"},
            **settings,
        }
    )
    model = ModelConfig(path=str(model_dir), max_context=512)
    return sft.run(run=RunConfig(seed=3), model=model, sft=table, stop=stop)


def log_lines(output: Path) -> list[dict[str, float]]:
    text = output.with_name(f"{output.name}.sft").joinpath("log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


@pytest.fixture(scope="module")
def finished(model_dir: Path, data_file: Path, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("finished") / "base"
    assert run_sft(model_dir, data_file, output) is True
    return output


def test_the_loss_falls_and_the_log_says_so(finished: Path):
    lines = log_lines(finished)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[0]["lr"] == pytest.approx(5e-3)
    assert lines[-1]["lr"] == pytest.approx(0.0, abs=1e-9)
    assert all(line["tokens_per_s"] > 0 for line in lines)
    summary = json.loads((finished.with_name("base.sft") / "summary.json").read_text())
    assert (summary["steps"], summary["dialogues"]) == (STEPS, 24)
    assert summary["tokens"] == lines[-1]["tokens"]
    assert not (finished.with_name("base.sft") / "state").exists()


def test_the_output_is_a_model_directory_that_knows_more(
    finished: Path, model_dir: Path, data_file: Path
):
    tokenizer = AutoTokenizer.from_pretrained(finished)
    text = tokenizer.apply_chat_template(
        json.loads(data_file.read_text().splitlines()[0])["messages"], tokenize=False
    )
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    losses = []
    for path in (model_dir, finished):
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            losses.append(model(ids, labels=ids).loss.item())
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("stop", "settings"),
    [
        (StopAfter(5), {}),
        (StopAfter(7, RuntimeError("the power failed")), {"checkpoint_every": 3}),
    ],
    ids=["stopped", "crashed"],
)
def test_an_interrupted_warm_start_goes_on_to_the_same_weights(
    finished: Path,
    model_dir: Path,
    data_file: Path,
    tmp_path: Path,
    stop: StopAfter,
    settings: dict[str, Any],
):
    output = tmp_path / "base"
    if stop.error is None:
        assert run_sft(model_dir, data_file, output, stop, **settings) is False
    else:
        with pytest.raises(RuntimeError, match="power failed"):
            run_sft(model_dir, data_file, output, stop, **settings)
    assert not output.exists()
    assert run_sft(model_dir, data_file, output, **settings) is True
    expected = weights(finished)
    for name, tensor in weights(output).items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)
    lines = log_lines(output)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == [line["loss"] for line in log_lines(finished)]


def test_the_state_of_another_warm_start_is_refused(
    model_dir: Path, data_file: Path, tmp_path: Path
):
    output = tmp_path / "base"
    assert run_sft(model_dir, data_file, output, StopAfter(1)) is False
    with pytest.raises(ValueError, match=r"another training \(different: sft\.lr\); remove"):
        run_sft(model_dir, data_file, output, lr=1e-3)


def test_a_corrupted_state_is_named_with_the_remedy(
    model_dir: Path, data_file: Path, tmp_path: Path
):
    output = tmp_path / "base"
    run_sft(model_dir, data_file, output, StopAfter(1))
    state = tmp_path / "base.sft" / "state"
    (state / "policy.safetensors").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"policy\.safetensors is corrupted: it has 0 bytes.*remove .*state"
    ):
        run_sft(model_dir, data_file, output)


def test_an_output_that_exists_is_refused_before_anything_is_read(finished: Path, model_dir: Path):
    with pytest.raises(ValueError, match=r"sft\.output .* exists already; remove it or name"):
        run_sft(model_dir, Path("missing.jsonl"), finished)


def test_several_batch_sizes_in_tokens(model_dir: Path, data_file: Path, tmp_path: Path):
    output = tmp_path / "base"
    settings: dict[str, Any] = {"batch_sequences": None, "batch_tokens": 700, "steps": 2}
    assert run_sft(model_dir, data_file, output, **settings) is True
    first = log_lines(output)[0]
    assert 0 < first["tokens"] <= 700
