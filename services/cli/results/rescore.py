"""`agent-r1 rescore RUN --config NEW`: what other rewards would have said of stored trajectories.

Reads the stored trajectories of a run folder, scores every trajectory with the reward service's
own scorer in this process, and prints both rewards side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.cli.declare import CONFIG_HELP, add_run_folder, add_set
from agent_r1.cli.results.show import stored
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, ConfigError, load_config
from agent_r1.launch.local_result import read_json
from agent_r1.reward.scorer import ComponentError, Scorer
from agent_r1.runs.record import main_turns
from agent_r1.runtime.exit_status import EXIT_FAILED
from agent_r1.runtime.files.run_folder import CONFIG_FILE
from agent_r1.runtime.files.writing import write_atomically
from agent_r1_proto.rewards import Reward, ScoreRequest, ScoreTurn


@dataclass(frozen=True)
class Rescored:
    """A stored trajectory and what it is worth under the new rewards."""

    record: dict[str, Any]
    before: Reward
    after: Reward | None
    """New reward; None when a component failed."""
    error: str = ""

    @property
    def group(self) -> tuple[int, int]:
        """Step and group."""
        return self.record["step"], self.record["group_id"]


def rescore_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rescore`."""
    add_run_folder(parser)
    config_help = f"{CONFIG_HELP}; without it, the run's own with --set"
    parser.add_argument("--config", type=Path, metavar="CONFIG", help=config_help)
    add_set(parser)
    out_help = "write both rewards of each trajectory there, as JSON lines"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out_help)


def rescore(arguments: argparse.Namespace) -> int:
    """Score the stored trajectories of a run with the [reward] of another configuration.

    Compared are mean rewards, components, and the share of groups whose trajectories all have the
    same reward, from which nothing is learned. Nothing is changed in the run folder.
    """
    folder: Path = arguments.run_folder
    files = [file for file in stored(folder) if file.step is not None]
    config = load_config(arguments.config or folder / CONFIG_FILE, arguments.options).config
    config_checks.use_plugins(config)
    records = [r for file in files for r in file.records() if r["reward"] is not None]
    if not records:
        raise ConfigError(
            f"{folder} has no stored trajectory with a reward; learner.trajectories_per_step says "
            "how many of each batch are stored"
        )
    scored = asyncio.run(_score_all(folder, config, records))
    for line in comparison_lines(scored):
        print(line)
    if arguments.out is not None:
        write_atomically(arguments.out, "".join(map(_line, scored)))
        print(f"rewards: {arguments.out}")
    failed = [one for one in scored if one.after is None]
    if failed:
        print(f"!! {len(failed)} of {len(scored)} were not scored; the first: {failed[0].error}")
        return EXIT_FAILED
    return 0


def _reads_otherwise(folder: Path, config: Config) -> bool:
    """Return whether a configuration finds answers in another way than the run did."""
    env = read_json(folder / CONFIG_FILE).get("env") or {}
    return env.get("answer_pattern") != config.env.answer_pattern


async def _score_all(
    folder: Path, config: Config, records: Sequence[dict[str, Any]]
) -> list[Rescored]:
    reader, anew = config.turn_reader(), _reads_otherwise(folder, config)
    scorer = Scorer(config.reward, reader)
    places = asyncio.Semaphore(config.reward.max_concurrent)

    async def score(record: dict[str, Any]) -> Rescored:
        before = Reward.model_validate(record["reward"])
        request = reader.read_request(request_of(record), anew=anew)
        async with places:
            try:
                return Rescored(record, before, await scorer.score(request))
            except (ComponentError, ValueError) as exc:
                return Rescored(record, before, None, f"{record['rollout_id']}: {exc}")

    try:
        return await asyncio.gather(*map(score, records))
    finally:
        await scorer.close()


def request_of(record: dict[str, Any]) -> ScoreRequest:
    """Return a stored trajectory as the components see it: what its main agent wrote and read."""
    return ScoreRequest(
        prompt=record["prompt"],
        payload=record["payload"],
        turns=main_turns(record["turns"]) or [ScoreTurn(text="")],
        status=record["status"],
    )


def comparison_lines(scored: Sequence[Rescored]) -> Iterator[str]:
    """Yield the lines that compare rewards before and after."""
    both = [(one.before, one.after) for one in scored if one.after is not None]
    if not both:
        return
    names = sorted({name for pair in both for reward in pair for name in reward.components})
    width = max(len("groups of equal rewards"), *map(len, names))
    yield f"{len(both)} trajectories of {len({one.record['step'] for one in scored})} steps"
    yield f"{'':{width}}    before     after"

    def row(name: str, *values: float | None) -> str:
        cells = ("-" if value is None else f"{value:.3f}" for value in values)
        return f"{name:{width}}  " + "  ".join(f"{cell:>8}" for cell in cells)

    yield row("reward", fmean(b.total for b, _ in both), fmean(a.total for _, a in both))
    for name in names:
        sides = (
            [pair[i].components[name] for pair in both if name in pair[i].components]
            for i in (0, 1)
        )
        yield row(name, *(fmean(values) if values else None for values in sides))
    yield row("groups of equal rewards", *_equal_shares(scored))


def _equal_shares(scored: Sequence[Rescored]) -> tuple[float | None, float | None]:
    """Return the shares of groups with one reward alone, before and after; None without groups."""
    groups: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for one in scored:
        if one.after is not None:
            groups[one.group].append((one.before.total, one.after.total))
    compared = [list(zip(*members, strict=True)) for members in groups.values() if len(members) > 1]
    if not compared:
        return None, None
    before, after = (fmean(len(set(sides[i])) == 1 for sides in compared) for i in (0, 1))
    return before, after


def _line(one: Rescored) -> str:
    names = ("step", "rollout_id", "group_id", "sample_index", "task_id")
    fields = {name: one.record[name] for name in names}
    after = None if one.after is None else one.after.model_dump(mode="json")
    values = {**fields, "before": one.before.model_dump(mode="json"), "after": after}
    return json.dumps(values, ensure_ascii=False) + "\n"
