"""`agent-r1 config check|show`: a configuration on paper, nothing started.

Reads the same sources as every other command; writes to the terminal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from agent_r1.config import checks as config_checks
from agent_r1.config.machine import SUPERVISED, Purpose
from agent_r1.config.run import Config, LoadedConfig, dump_config, load_config
from agent_r1.config.sources import Key, dotted
from agent_r1.learner.redis_memory import worst_case_redis_bytes
from agent_r1.runtime.files.run_folder import CONFIG_FILE
from agent_r1.runtime.memory import MIB


def purposes_of(config: Config) -> list[Purpose]:
    """Return the commands that a configuration is for; `train` where none of its tables says."""
    on_dialogues: list[Purpose] = [
        purpose for purpose in SUPERVISED if config.supervised(purpose) is not None
    ]
    return on_dialogues if on_dialogues and config.data is None else ["train", *on_dialogues]


def check(arguments: argparse.Namespace) -> int:
    """Validate everything a run would use."""
    config = load_config(arguments.config, arguments.options).config
    here = not arguments.elsewhere
    first, *others = purposes_of(config)
    # The run of this configuration may have begun: it can be continued, and is no problem.
    begun = (config.run.folder() / CONFIG_FILE).is_file()
    findings = config_checks.look(config, first, machine=here, resume=begun)
    for purpose in others:
        findings.add(config_checks.look(config, purpose, machine=here))
    config_checks.refuse(findings)
    print(f"{arguments.config}: ok (agent-r1 {first.replace('_', '-')})")
    print(f"this machine: {'ok' if here else 'skipped (--elsewhere)'}")
    for note in findings.notes:
        print(f"note: {note}")
    if first == "train":
        learner, evaluation = config.learner, config.evaluation
        size = config.model.max_context, config.max_segments
        need = worst_case_redis_bytes(learner, evaluation, *size)
        print(f"Redis needs at most {need / MIB:.0f} MiB for messages in flight")
    return 0


def _rows(loaded: LoadedConfig, values: Any, key: Key = ()) -> Iterator[tuple[str, str, str]]:
    inside = any(len(other) > len(key) and other[: len(key)] == key for other in loaded.origins)
    if isinstance(values, dict) and values and (inside or key not in loaded.origins):
        for name, value in values.items():
            yield from _rows(loaded, value, (*key, name))
        return
    shown = "none" if values is None else json.dumps(values, ensure_ascii=False)
    yield dotted(key), shown, loaded.origin(key)


def show(arguments: argparse.Namespace) -> int:
    """Print every value and where it came from."""
    loaded = load_config(arguments.config, arguments.options)
    values, _ = dump_config(loaded.config)
    rows = [row for row in _rows(loaded, values) if row[0] not in ("data", *SUPERVISED)]
    width = max(len(f"{name} = {value}") for name, value, _ in rows if len(value) < 50)
    for name, value, origin in rows:
        print(f"{f'{name} = {value}':<{width}}  # {origin}")
    return 0
