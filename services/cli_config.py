"""`agent-r1 config check|show`: a configuration on paper, nothing started.

Reads the same sources as every other command; writes to the terminal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from agent_r1 import config_checks
from agent_r1.config import LoadedConfig, dump_config, load_config
from agent_r1.config_sources import Key, dotted


def check(arguments: argparse.Namespace) -> int:
    """Validate everything a run would use."""
    config = load_config(arguments.config, arguments.options).config
    only_sft = config.sft is not None and config.data is None
    purpose: config_checks.Purpose = "sft" if only_sft else "train"
    config_checks.check(config, purpose)
    if config.sft is not None and config.data is not None:
        config_checks.check(config, "sft")
    for key, listen in config_checks.listeners(config):
        config_checks.check_port(listen, key)
    print(f"{arguments.config}: ok ({'agent-r1 sft' if only_sft else 'agent-r1 train'})")
    if not only_sft:
        need = config_checks.worst_case_redis_bytes(config) / config_checks.MIB
        print(f"Redis needs at most {need:.0f} MiB for messages in flight")
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
