"""Demonstrations for the warm start: JSON-lines files in, samples and their order out.

files of `sft.data` --> load_dialogues --TrainSample--> supervised.py, in the order of
plan_batches
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from agent_r1.learner.config import SftConfig, SupervisedConfig
from agent_r1.learner.engine.interface import TrainSample
from agent_r1.learner.sft.loss_mask import DialogueEncoder
from agent_r1.runtime.files.file_formats import BadLines, check_utf8, foreign_format, numbered_lines
from agent_r1_proto.foreign_messages import own_dialogue
from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.tasks import ChatMessage

Parsed = TypeVar("Parsed")
LINE = 'a line is {"messages": [{"role": ..., "content": ...}, ...]}'


class Demonstration(StrictMessage):
    """One line of an `sft.data` file."""

    messages: Annotated[list[ChatMessage], Field(min_length=2)]
    """The dialogue; it ends with an assistant message."""
    tools: list[dict[str, Any]] | None = None
    """Function descriptions for the chat template; None renders none."""

    @model_validator(mode="before")
    @classmethod
    def _read_sharegpt(cls, values: Any) -> Any:
        return own_dialogue(values)


@dataclass(frozen=True)
class SftData:
    """All demonstrations in tokens."""

    samples: list[TrainSample]
    """One per dialogue; `advantages` holds token weights."""
    digest: str
    """SHA-256 over the files, for resuming with the same data only."""
    states: Sequence[Sequence[int]] = ()
    """Samples that stay together in a batch, because they continue one state; all others are drawn
    one by one."""

    @property
    def num_tokens(self) -> int:
        """Tokens of one pass."""
        return sum(sample.num_tokens for sample in self.samples)


def load_dialogues(config: SftConfig, encoder: DialogueEncoder, max_context: int) -> SftData:
    """Read and encode every demonstration.

    Raises:
        ValueError: a file is missing or empty, or a line is wrong; it names file and line.
    """
    digest = hashlib.sha256()

    def parse(line: bytes) -> TrainSample:
        digest.update(line)
        return _encode(Demonstration.model_validate_json(line), config, encoder, max_context)

    samples: list[TrainSample] = []
    for path in config.data:
        if not path.exists():
            raise ValueError(f"sft.data ({path}) is missing; name a JSON-lines file of dialogues")
        if (foreign := foreign_format(path)) is not None:
            raise ValueError(f"sft.data: {foreign}")
        found = read_lines(path, parse, LINE)
        if not found:
            raise ValueError(f"{path} holds no dialogue; it needs one JSON object a line")
        samples += found
    return SftData(samples, digest.hexdigest())


def read_lines(path: Path, parse: Callable[[bytes], Parsed], remedy: str) -> list[Parsed]:
    """Parse every line of a JSON-lines file that is not blank.

    Args:
        path: the file.
        parse: makes something of a line; a ValueError says why it cannot.
        remedy: said of lines that pydantic refuses.

    Raises:
        ValueError: lines are wrong; the first ten are named.
    """
    found: list[Parsed] = []
    bad, number = BadLines(path), 0
    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        try:
            check_utf8(line, path)
            if line.strip():
                found.append(parse(line))
        except ValueError as exc:
            bad.add(where, exc, remedy)
    if bad:
        raise ValueError(bad.text(number))
    return found


def _encode(
    demonstration: Demonstration, config: SftConfig, encoder: DialogueEncoder, max_context: int
) -> TrainSample:
    encoded = encoder.encode(demonstration.messages, demonstration.tools)
    num_tokens = len(encoded.token_ids)
    if num_tokens > max_context:
        raise ValueError(
            f"the dialogue has {num_tokens} tokens; model.max_context is {max_context}: raise it "
            "or drop the dialogue"
        )
    weights = np.where(encoded.assistant_mask, 1.0, config.other_token_weight).astype(np.float32)
    weights[0] = 0.0
    return weighted_sample(encoded.token_ids, weights)


def weighted_sample(
    token_ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32], name: str = ""
) -> TrainSample:
    """Return [T] tokens as a sample of the loss "nll", where a token may weigh 0."""
    return TrainSample(
        token_ids=token_ids,
        loss_mask=weights > 0,
        rollout_logprobs=np.zeros(len(weights), np.float32),
        advantages=weights,
        name=name,
    )


def plan_batches(
    lengths: Sequence[int],
    config: SupervisedConfig,
    seed: int,
    states: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """Order the demonstrations over all epochs and cut them into optimizer batches.

    Args:
        lengths: [N] tokens per demonstration.
        config: epochs, batch size and the limits `steps` and `max_tokens`.
        seed: orders each epoch.
        states: those that stay together.

    Returns:
        One list of indices per optimizer step, ended by whichever limit comes first; each epoch
        is cut on its own, so that its last batch may be smaller.
    """
    batches: list[list[int]] = []
    tokens = 0
    alone = set(range(len(lengths))).difference(*states)
    units = [*([i] for i in sorted(alone)), *states]
    for epoch in range(config.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(units))
        for batch in _cut([units[i] for i in order], lengths, config):
            if config.steps is not None and len(batches) == config.steps:
                return batches
            if config.max_tokens is not None and tokens >= config.max_tokens:
                return batches
            batches.append(batch)
            tokens += sum(lengths[i] for i in batch)
    return batches


def _cut(
    units: Sequence[Sequence[int]], lengths: Sequence[int], config: SupervisedConfig
) -> Iterator[list[int]]:
    """Cut one epoch's order into batches."""
    batch: list[int] = []
    tokens = 0
    for unit in units:
        added = sum(lengths[i] for i in unit)
        if config.batch_sequences is not None:
            full = len(batch) + len(unit) > config.batch_sequences
        else:
            assert config.batch_tokens is not None
            full = tokens + added > config.batch_tokens
        if full and batch:
            yield batch
            batch, tokens = [], 0
        batch += unit
        tokens += added
    if batch:
        yield batch
