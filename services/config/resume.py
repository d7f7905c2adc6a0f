"""Keys that may be given again when a run is resumed: `config.json`, `--set` --> error or none.

A run that went on with another objective, other data or other tools would be a run of its own, and
its metrics would hide where it changed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from agent_r1.config.run import Config, LoadedConfig, dump_config
from agent_r1.config.sources import ConfigError, flat_leaves

MAY_DIFFER = {
    "steps and checkpoints": (
        *("learner.steps", "learner.epochs", "learner.checkpoint_*", "learner.keep_*"),
        *("learner.max_failed_share", "learner.max_lost_share", "learner.max_attempts"),
    ),
    "logging": (
        *("run.log_level", "run.log_format", "run.otlp_endpoint"),
        *("learner.loggers", "learner.trajectories_*"),
    ),
    "evaluation": ("evaluation.*",),
    "placement: addresses, processes, memory, time limits": (
        *("placement.*", "ray.*", "redis.*", "rollout.*", "learner.server.*", "run.token_file"),
        *("run.tool_pool", "engine.ranks", "engine.rank_interface", "engine.device"),
        *("engine.torch_threads", "engine.gpu_memory_share", "engine.offload"),
        *("engine.max_tokens_per_microbatch", "engine.max_padding_share"),
        *("engine.logprob_chunk_tokens", "engine.activation_checkpointing"),
        *("engine.share_prefixes", "engine.packing", "model.attention"),
        *("learner.transport", "learner.collective_port", "learner.collective_backend"),
        *("learner.push", "learner.dense_every"),
        "learner.canary_*",
        *("*.host", "*.port", "*.advertise_host", "*.allowed_hosts", "tools.*.url", "agent.engine"),
        "*_timeout_s",
        *("tools.*.max_calls_in_flight", "tools.*.announce_expiry_s", "tools.*.search_threads"),
        *("reward.max_concurrent", "env.tool_retries"),
    ),
    "where files are": (
        *(
            "run.dir",
            "run.plugins",
            "model.path",
            "model.lora.path",
            "data.train",
            "learner.critic_path",
        ),
        *("*.weights_dir", "tools.*.corpus", "tools.*.index_dir", "tools.*.ca_certs"),
    ),
    "what training does not read": ("sft.*", "train_reward.*", "config_version"),
}
"""Keys that a resumed run may be given anew, by what they are for; `*` stands for any text. What a
file holds must stay the same: the learner checks its prompts against the checkpoint."""


def may_differ(key: str) -> bool:
    """Say whether a resumed run may have another value at a dotted key."""
    return any(
        fnmatch.fnmatchcase(key, pattern) for keys in MAY_DIFFER.values() for pattern in keys
    )


def refuse_changes(written: Config, given: LoadedConfig) -> None:
    """Refuse to go on with what would make the run another one.

    Args:
        written: the configuration that the run has had so far.
        given: the same, with the options and variables of this start.

    Raises:
        ConfigError: a key differs that must not; each is named with both values.
    """
    old, new = (dict(flat_leaves(dump_config(config)[0])) for config in (written, given.config))
    changed = [
        f"  {key}: {_shown(old, key)} in the run, {_shown(new, key)} now "
        f"[{given.origin(tuple(key.split('.')))}]"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not may_differ(key)
    ]
    if changed:
        raise ConfigError(_refusal(changed))


def _refusal(changed: Sequence[str]) -> str:
    groups = "; ".join(MAY_DIFFER)
    return "\n".join(
        [
            "a resumed run keeps its configuration, and this would change it:",
            *changed,
            f"remove these changes, or start a new run; you may change {groups} "
            "(docs/checkpoints.md lists the keys)",
        ]
    )


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "nothing"
