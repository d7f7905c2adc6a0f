"""`agent-r1 config check|show`: a configuration on paper, nothing started.

Reads the same sources as every other command; writes to the terminal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from agent_r1.config import checks as config_checks
from agent_r1.config.machine import MIB, Purpose
from agent_r1.config.run import Config, LoadedConfig, dump_config, load_config
from agent_r1.config.sources import Key, dotted
from agent_r1.learner.redis_memory import worst_case_redis_bytes
from agent_r1_service.files.run_folder import CONFIG_FILE


def purpose_of(config: Config) -> Purpose:
    """Return the command that a configuration is for."""
    return "sft" if config.sft is not None and config.data is None else "train"


def check(arguments: argparse.Namespace) -> int:
    """Validate everything a run would use."""
    config = load_config(arguments.config, arguments.options).config
    here = not arguments.elsewhere
    purpose = purpose_of(config)
    only_sft = purpose == "sft"
    # The run of this configuration may have begun: it can be continued, and is no problem.
    begun = (config.run.folder() / CONFIG_FILE).is_file()
    findings = config_checks.look(config, purpose, machine=here, resume=begun)
    if config.sft is not None and config.data is not None:
        findings.add(config_checks.look(config, "sft", machine=here))
    config_checks.refuse(findings)
    print(f"{arguments.config}: ok ({'agent-r1 sft' if only_sft else 'agent-r1 train'})")
    print(f"this machine: {'ok' if here else 'skipped (--elsewhere)'}")
    for note in findings.notes:
        print(f"note: {note}")
    if not only_sft:
        learner, evaluation = config.learner, config.evaluation
        need = worst_case_redis_bytes(learner, evaluation, config.model.max_context)
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
    rows = [row for row in _rows(loaded, values) if row[0] not in ("data", "sft")]
    width = max(len(f"{name} = {value}") for name, value, _ in rows if len(value) < 50)
    for name, value, origin in rows:
        print(f"{f'{name} = {value}':<{width}}  # {origin}")
    return 0
