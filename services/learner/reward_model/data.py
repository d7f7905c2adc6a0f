"""Stored trajectories as a reward model learns them: a dialogue so far, and the verdict on it.

stored trajectories of runs (runs/store.py), or answers whose turns were continued
(evaluation/answer_file.py) --> train_and_test --JudgedEpisode--> training_data --TrainSample-->
sft/supervised.py
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import from_json

from agent_r1.learner.config import TrainRewardConfig
from agent_r1.learner.engine.interface import PolicyEngine, TrainSample
from agent_r1.learner.reward_model.ranking import Candidate, weighed
from agent_r1.learner.sft.data import SftData, read_lines, weighted_sample
from agent_r1.learner.sft.loss_mask import DialogueEncoder
from agent_r1.runs.record import main_turns
from agent_r1.runs.store import StoredFile, stored_files
from agent_r1.runtime.files.run_folder import TRAJECTORIES_DIR
from agent_r1.text.reading import TurnReader
from agent_r1.text.verdicts import BAD, GOOD, verdict_dialogue
from agent_r1_proto.rewards import Reward, ScoreRequest, ScoreTurn
from agent_r1_proto.tasks import ChatMessage

TOTAL = "total"
_READER = TurnReader()
"""Reads turns of older versions, of which only the thoughts matter here."""


class _Candidate(BaseModel):
    turn: ScoreTurn
    outcomes: Annotated[list[float], Field(min_length=1)]


class _Place(BaseModel):
    turns: list[ScoreTurn]
    candidates: list[_Candidate]


class _Answer(BaseModel):
    """Fields read of an answer that `agent-r1 evaluate --decode-continuations` wrote."""

    id: str
    prompt: list[ChatMessage]
    place: _Place | None


class _Record(BaseModel):
    """Fields read of a stored trajectory."""

    task_id: str
    status: str
    prompt: list[ChatMessage]
    turns: Annotated[list[ScoreTurn], BeforeValidator(main_turns)]
    reward: Reward | None


@dataclass(frozen=True)
class JudgedEpisode:
    """One finished interaction and what it was worth."""

    task_id: str
    status: str
    prompt: list[ChatMessage]
    turns: list[ScoreTurn]
    statuses: list[str]
    """Statuses of all calls."""
    label: float
    """0.0 to 1.0."""
    place: str = ""
    """Names the state in which its last turn was one of several candidates, whose labels are mean
    rewards of their continuations; "" for what one interaction came to."""


def train_and_test(config: TrainRewardConfig) -> tuple[list[JudgedEpisode], list[JudgedEpisode]]:
    """Return the episodes to train on, and those that the report is about.

    Raises:
        ValueError: a file is missing or a line is wrong, a label is missing or outside 0 to 1,
            there are not both good and bad ones, or nothing is left to train on or to report on.
    """
    episodes = read_episodes(config.trajectories, "trajectories", config.label)
    _check_options(config, episodes)
    if not config.test_trajectories:
        return split(episodes, config.held_out)
    test = read_episodes(config.test_trajectories, "test_trajectories", config.label)
    both = {episode.task_id for episode in episodes} & {episode.task_id for episode in test}
    if both:
        raise ValueError(
            f"train_reward.test_trajectories has {len(both)} tasks that train_reward.trajectories "
            f"has as well, such as {min(both)!r}; name trajectories of other tasks"
        )
    return episodes, test


def _check_options(config: TrainRewardConfig, episodes: Sequence[JudgedEpisode]) -> None:
    """Refuse options that do nothing for such episodes.

    Raises:
        ValueError: there is one.
    """
    continued = [bool(episode.place) for episode in episodes]
    if config.ranking and not any(continued):
        raise ValueError(
            f"train_reward.ranking ({config.ranking:g}) ranks candidates of one state, and "
            "train_reward.trajectories has none; name answers of `agent-r1 evaluate "
            "--decode-continuations`, or leave it out"
        )
    usual = TrainRewardConfig.model_fields["label"].default
    if config.label != usual and all(continued):
        raise ValueError(
            f"train_reward.label ({config.label!r}) names a reward of whole interactions, and "
            "train_reward.trajectories has only turns that were continued, which say what they "
            "are worth; leave it out"
        )


def read_episodes(paths: Sequence[Path], key: str, label: str) -> list[JudgedEpisode]:
    """Read the trajectories that were scored; FAILED ones have no reward and are left out.

    Args:
        paths: run folders, or files.
        key: of `[train_reward]` that names them, for messages.
        label: the component that is learned.

    Raises:
        ValueError: a file is missing or a line is wrong, a label is missing or outside 0 to 1, or
            there are not both good and bad ones.
    """
    episodes = [episode for path in _files(paths, key) for episode in _read(path, label)]
    labels = {episode.label for episode in episodes}
    if len(labels) < 2:
        raise ValueError(
            f"train_reward.{key} holds {len(episodes)} scored trajectories whose "
            f"{label} is {sorted(labels)}; a reward model needs good and bad ones: name "
            "runs with both, and see learner.trajectories_per_step"
        )
    return episodes


def split(
    episodes: Sequence[JudgedEpisode], held_out: float
) -> tuple[list[JudgedEpisode], list[JudgedEpisode]]:
    """Return the episodes to train on, and those of the tasks that are held out.

    A hash of its id says where a task belongs, so more trajectories move none.

    Raises:
        ValueError: one of the two is empty.
    """

    def is_held_out(task_id: str) -> bool:
        digest = hashlib.blake2b(task_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest) < held_out * 2**64

    train = [episode for episode in episodes if not is_held_out(episode.task_id)]
    test = [episode for episode in episodes if is_held_out(episode.task_id)]
    if not (train and test):
        raise ValueError(
            f"train_reward.held_out ({held_out}) leaves {len(train)} trajectories to train on and "
            f"{len(test)} to report on; it goes by task: name trajectories of more tasks"
        )
    return train, test


def _files(paths: Iterable[Path], key: str) -> Iterator[Path]:
    for path in paths:
        if path.is_file():
            yield path
            continue
        found = [file.path for file in stored_files(path) if file.step is not None]
        if not found:
            raise ValueError(
                f"train_reward.{key} ({path}) is no file, and no run folder with "
                f"{TRAJECTORIES_DIR}/step_*; name a run whose learner.trajectories_per_step "
                "is not 0"
            )
        yield from found


def _read(path: Path, label: str) -> list[JudgedEpisode]:
    number = count(1)

    def parse(line: bytes) -> list[JudgedEpisode]:
        values = from_json(line)
        if "place" in values:
            return list(_candidates(_Answer.model_validate(values), f"{path}:{next(number)}"))
        episode = _episode(_Record.model_validate(values), label)
        return [] if episode is None else [episode]

    if path.suffix == ".parquet":
        records = map(_Record.model_validate, StoredFile(path, None, None).records())
        return [found for one in records if (found := _episode(one, label)) is not None]
    remedy = f"the file must be one of a run's folder {TRAJECTORIES_DIR}"
    found = list(chain.from_iterable(read_lines(path, parse, remedy)))
    if not found and next(number) > 1:
        raise ValueError(
            f"{path} has answers, and none of them was continued after several candidates; ask for "
            "them with --decode-continuations and a higher temperature"
        )
    return found


def _episode(record: _Record, label: str) -> JudgedEpisode | None:
    if record.reward is None or not record.turns:
        return None
    values = record.reward.components | {TOTAL: record.reward.total}
    value = values.get(label)
    if value is None:
        raise ValueError(
            f"train_reward.label ({label!r}) was not measured; name one of "
            f"{', '.join(sorted(values))}, or trajectories of a run whose reward.components names "
            "it (0.0 measures it only)"
        )
    if not 0.0 <= value <= 1.0:
        raise ValueError(
            f"{label} is {value}, and train_reward.label must be from 0 to 1; name another one of "
            + ", ".join(sorted(values))
        )
    return JudgedEpisode(
        task_id=record.task_id,
        status=record.status,
        prompt=record.prompt,
        turns=_READER.read_request(ScoreRequest(payload={}, turns=record.turns)).turns,
        statuses=[call.status for turn in record.turns for call in turn.calls],
        label=value,
    )


def _candidates(answer: _Answer, name: str) -> Iterator[JudgedEpisode]:
    """Return an episode for each candidate of the state that an answer came to."""
    place = answer.place or _Place(turns=[], candidates=[])
    for candidate in place.candidates:
        value = fmean(candidate.outcomes)
        if not 0.0 <= value <= 1.0:
            raise ValueError(
                f"the mean reward of a candidate is {value}, and what is learned must be from 0 to "
                "1; let another reward judge the continuations"
            )
        turns = [*place.turns, candidate.turn]
        yield JudgedEpisode(
            task_id=answer.id,
            status="COMPLETED",
            prompt=answer.prompt,
            turns=_READER.read_request(ScoreRequest(payload={}, turns=turns)).turns,
            statuses=[call.status for turn in turns for call in turn.calls],
            label=value,
            place=name,
        )


class VerdictEncoder:
    """Encodes dialogues with a verdict at the end.

    Args:
        encoder: of the model's dialogues.
        question: what the model is asked.
        max_context: most tokens of one dialogue.
        thoughts: whether it reads what the agent thinks.

    Raises:
        ValueError: the two verdicts begin with the same token.
    """

    def __init__(
        self, encoder: DialogueEncoder, question: str, max_context: int, *, thoughts: bool = True
    ) -> None:
        self._encoder = encoder
        self._question = question
        self._thoughts = thoughts
        self._max_context = max_context
        asked = [ChatMessage(role="user", content=question)]
        good, bad = (self._tokens(asked, verdict) for verdict in (GOOD, BAD))
        if good[0][good[1]] == bad[0][bad[1]]:
            raise ValueError(
                f"the tokenizer begins {GOOD!r} and {BAD!r} with the same token, so the model "
                "could not tell them apart; use a model with another tokenizer"
            )

    def sample(
        self,
        episode: JudgedEpisode,
        num_turns: int,
        verdict: str,
        weight: float,
        *,
        scored: bool = False,
    ) -> TrainSample | None:
        """Return the first turns of an episode with a verdict, or None where they are too long.

        Args:
            episode: the interaction.
            num_turns: how many of its turns.
            verdict: GOOD or BAD.
            weight: of the verdict's token.
            scored: the token counts even if it weighs nothing yet.
        """
        asked = verdict_dialogue(
            episode.prompt, episode.turns[:num_turns], self._question, thoughts=self._thoughts
        )
        token_ids, at = self._tokens(asked, verdict)
        # Only the first token of the verdict is learned: the others follow from it.
        token_ids = token_ids[: at + 1]
        if len(token_ids) > self._max_context:
            return None
        weights = np.zeros(len(token_ids), np.float32)
        weights[at] = weight
        sample = weighted_sample(token_ids, weights, episode.task_id)
        sample.loss_mask[at] |= scored
        return sample

    def _tokens(self, asked: list[ChatMessage], verdict: str) -> tuple[Any, int]:
        """Return [T] token ids, and the index of the verdict's first token."""
        said = [*asked, ChatMessage(role="assistant", content=verdict)]
        encoded = self._encoder.encode(said)
        given = np.flatnonzero(~encoded.assistant_mask)
        return encoded.token_ids, int(given[-1]) + 1


@dataclass(frozen=True)
class VerdictData(SftData):
    """Samples whose last token is a verdict; it weighs as much as the label says."""

    rivals: Sequence[Sequence[Candidate]] = ()
    """Rivals of each state, where they are ranked."""

    def weighed(
        self, engine: PolicyEngine, batch: Sequence[int], ranking: float
    ) -> list[TrainSample]:
        """Return the samples of a batch, with a ranking loss of this weight."""
        states = [state for state in self.rivals if state and state[0].good in batch]
        found = weighed(engine, self.samples, states, ranking)
        return [found.get(i, self.samples[i]) for i in batch]


def training_data(
    episodes: Sequence[JudgedEpisode], encoder: VerdictEncoder, config: TrainRewardConfig
) -> VerdictData:
    """Return a sample for each verdict with a weight: a label of 0.3 is 0.3 yes and 0.7 no.

    Candidates that are ranked have a sample for both verdicts, whatever they weigh.

    Raises:
        ValueError: every dialogue is too long.
    """
    samples: list[TrainSample] = []
    states: dict[str, list[int]] = defaultdict(list)
    rivals: dict[str, list[Candidate]] = defaultdict(list)
    digest = hashlib.sha256()
    for episode in episodes:
        digest.update(json.dumps([episode.task_id, episode.label]).encode())
        before, ranked = len(samples), bool(config.ranking and episode.place)
        last = len(episode.turns)
        first = 1 if config.turns == "all" and not episode.place else last
        for num_turns in range(first, last + 1):
            for verdict, weight in ((GOOD, episode.label), (BAD, 1.0 - episode.label)):
                if weight > 0.0 or ranked:
                    sample = encoder.sample(episode, num_turns, verdict, weight, scored=ranked)
                    samples += [] if sample is None else [sample]
        if episode.place and len(samples) > before:
            states[episode.place] += range(before, len(samples))
            if ranked:
                rivals[episode.place].append(Candidate(before, before + 1, episode.label))
    for sample in samples:
        digest.update(sample.token_ids.tobytes())
    if states:
        digest.update(json.dumps(list(states.values())).encode())
    if not samples:
        raise ValueError(
            "every dialogue of train_reward.trajectories is longer than model.max_context; raise it"
        )
    together, ranked_states = list(states.values()), list(rivals.values())
    return VerdictData(samples, digest.hexdigest(), together, ranked_states)
