"""One run of TRL's GRPOTrainer for __main__.py, in the environment that it made for TRL.

    python side.py SETTINGS.json

Trains on the questions of SETTINGS, with tiny_world's search in the same process as its tool, and
writes a JSON line a step: its seconds, mean reward, trajectories, tokens that carry loss, and the
tokens that TRL computed with their padding.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# datasets and trl are in the environment of TRL only, and pyright takes this folder for trl.

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
THREADS = int(SETTINGS["trl"].get("threads", 2))
os.environ["OMP_NUM_THREADS"] = str(THREADS)  # torch reads it when it is imported

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from agent_r1.reward.scoring import exact_match  # noqa: E402
from agent_r1.runtime.files.state import split_lines  # noqa: E402
from agent_r1.text.reading import parse_turn  # noqa: E402
from agent_r1.tools.search.tantivy_bm25 import open_index  # noqa: E402

FOLDER = Path(SETTINGS["folder"])
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""By which TRL reads the calls that the template renders."""


def make_tool() -> Any:
    """Return tiny_world's search as a function; one that waits is asynchronous."""
    index = open_index(Path(SETTINGS["corpus"]))
    waits_s = itertools.cycle(SETTINGS["waits_s"])

    def search(query: str) -> str:
        """Search an encyclopedia.

        Args:
            query: What to search for.
        """
        (hits,) = index.search([query], 2)
        return "\n".join(f" {hit.passage.text}" for hit in hits)

    async def delayed(query: str) -> str:
        await asyncio.sleep(next(waits_s))
        return search(query)

    delayed.__name__, delayed.__doc__ = search.__name__, search.__doc__
    return delayed if any(SETTINGS["waits_s"]) else search


def exact_match_reward(completions: Any, answers: Any, **_: Any) -> list[float]:
    """Score the last message, as tiny_world does."""
    texts = [_written(completion)[-1] for completion in completions]
    return [
        exact_match(parse_turn(text).answer, own) for text, own in zip(texts, answers, strict=True)
    ]


def _written(completion: list[dict[str, Any]]) -> list[str]:
    return ["", *(one["content"] for one in completion if one["role"] == "assistant")]


def chance_reward(completions: Any, **_: Any) -> list[float]:
    """Score by a hash of the text, so that every step has gradients."""
    texts = ["".join(message["content"] for message in one) for one in completions]
    return [hashlib.blake2b(text.encode(), digest_size=1).digest()[0] / 256 for text in texts]


class Measured(GRPOTrainer):
    """Counts what a step trains."""

    counts: dict[str, int]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"]
        if output.get("tool_mask") is not None:
            mask = mask * output["tool_mask"]
        rows, width = output["completion_ids"].shape
        self.counts = {
            "trajectories": rows,
            "loss_tokens": int(mask.sum()),
            "computed_tokens": rows * (width + output["prompt_ids"].shape[1]),
        }
        return output


class Recorder(TrainerCallback):
    """Writes a line after every step."""

    trainer: Any = None
    _last = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it, and start it again."""
        seconds = time.perf_counter() - self._last
        reward = float(self.trainer._metrics["train"]["reward"][-1])
        line = {"seconds": seconds, "reward": reward, **self.trainer.counts}
        with (FOLDER / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._last = time.perf_counter()


def make_config(cell: dict[str, Any], trl: dict[str, Any]) -> GRPOConfig:
    """Return TRL's configuration of the same algorithm and limits as ours (run.toml)."""
    trajectories = cell["questions"] * cell["group_size"]
    batch = min(trl["batch"], trajectories)
    chosen = dict(trl.get("config", {}))
    per_turn = {"max_new_tokens": cell["max_tokens_per_turn"]}
    generation = per_turn | chosen.pop("generation_kwargs", {})
    return GRPOConfig(
        output_dir=str(FOLDER / "trainer"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=trajectories // batch,
        num_generations=cell["group_size"],
        max_steps=SETTINGS["steps"],
        max_completion_length=cell["max_completion"],
        max_tool_calling_iterations=cell["max_turns"] - 1,
        generation_kwargs=generation,
        temperature=1.0,
        learning_rate=cell["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        weight_decay=0.0,
        beta=0.0,
        loss_type="dapo",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=trl.get("dtype") == "bfloat16",
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        seed=SETTINGS["seed"],
        **chosen,
    )


def main() -> None:
    """Train."""
    torch.set_num_threads(THREADS)
    cell, trl = SETTINGS["cell"], SETTINGS["trl"]
    lines = split_lines(Path(SETTINGS["questions"]).read_text(encoding="utf-8"))
    rows = [
        {
            "prompt": [{"role": "user", "content": one["prompt"]}],
            "answers": one["payload"]["answers"],
        }
        for one in map(json.loads, lines)
    ]
    model = AutoModelForCausalLM.from_pretrained(
        SETTINGS["model"],
        dtype=getattr(torch, trl.get("dtype", "float32")),
        attn_implementation=trl.get("attention", "sdpa"),
    )
    tokenizer = AutoTokenizer.from_pretrained(SETTINGS["model"])
    tokenizer.response_template = RESPONSE_TEMPLATE
    recorder = Recorder()
    recorder.trainer = Measured(
        model=model,
        processing_class=tokenizer,
        reward_funcs=exact_match_reward if cell["model"] == "tiny" else chance_reward,
        tools=[make_tool()] if cell["max_turns"] > 1 else None,
        args=make_config(cell, trl),
        train_dataset=Dataset.from_list(rows),
        callbacks=[recorder],
    )
    recorder.trainer.train()


if __name__ == "__main__":
    main()
