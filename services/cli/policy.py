"""MODEL_OR_RUN on the command line: a model or an adapter, or a run's last checkpoint.

`evaluate` and `chat` read it; chat also takes its configuration from the run that made the model.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from agent_r1.config.checks import check_model
from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError, at_hand
from agent_r1.learner.checkpoints.run_checkpoint import STEP_NAME
from agent_r1.runtime.files.run_folder import CHECKPOINTS_DIR, CONFIG_FILE, STATE_FILE
from agent_r1.weights.adapters import ADAPTER_CONFIG_FILE, is_adapter, read_adapter


def is_run_folder(folder: Path) -> bool:
    """Say whether a folder is a run folder (its config.json is a run's and not a model's)."""
    try:
        values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and {"run", "model", "learner"} <= values.keys()


def last_checkpoint_model(run_folder: Path) -> Path | None:
    """Return the model or adapter of a run's last checkpoint; None when it has none yet."""
    folders = run_folder.glob(f"{CHECKPOINTS_DIR}/step_*/model")
    found = [one for one in folders if is_adapter(one) or (one / "config.json").is_file()]
    steps = {int(step[1]): path for path in found if (step := STEP_NAME.match(path.parts[-2]))}
    return steps[max(steps)] if steps else None


def policy_model(policy: str) -> str:
    """Return the folder of a model or an adapter, or the name on a hub, that MODEL_OR_RUN means.

    Raises:
        ConfigError: it is none of them, or a run folder without a checkpoint.
    """
    folder = Path(policy).expanduser()
    if not is_run_folder(folder):
        path = str(folder.resolve()) if folder.is_dir() else policy
        if is_adapter(Path(path)):
            return path
        problem = check_model(path, "MODEL_OR_RUN")
        if problem is not None:
            raise ConfigError(f"{problem}, or a run folder")
        return path
    model = last_checkpoint_model(folder)
    if model is None:
        raise ConfigError(
            f"run folder {policy} has no checkpoint yet; let it reach one (learner."
            "checkpoint_every, or the end of the run), or name a model directory"
        )
    return str(model.resolve())


def policy_keys(policy: str) -> dict[str, Any]:
    """Return the keys of the table `model` that say what MODEL_OR_RUN means.

    Raises:
        ValueError: it is nothing that can be the policy; or an adapter whose model is missing.
    """
    path = policy_model(policy)
    if not is_adapter(Path(path)):
        return {"path": path}
    adapter = read_adapter(Path(path))
    problem = check_model(adapter.base, f"base_model_name_or_path of {path}/{ADAPTER_CONFIG_FILE}")
    if problem is not None:
        raise ConfigError(problem)
    return {"path": adapter.base, "lora": adapter.lora}


def with_policy(config: Config, policy: str) -> Config:
    """Return the configuration with another model, or a model with an adapter, as the policy."""
    model = config.model.model_copy(update={"lora": None, **policy_keys(policy)})
    return config.model_copy(update={"model": model})


def policy_options(policy: str) -> list[str]:
    """Return the options `KEY=VALUE` with which training starts from MODEL_OR_RUN."""
    keys = policy_keys(policy)
    options = [f"model.path={json.dumps(keys['path'])}"]
    lora = keys["lora"].model_dump(mode="json") if "lora" in keys else {}
    return options + [f"model.lora.{name}={json.dumps(value)}" for name, value in lora.items()]


def describe_policy(model: str) -> str:
    """Say which policy a model is: the step of its run where it is a checkpoint, else its name."""
    checkpoint = Path(model).parent
    step = STEP_NAME.match(checkpoint.name)
    if step is None or checkpoint.parent.name != CHECKPOINTS_DIR:
        return model
    version = ""
    with contextlib.suppress(OSError, ValueError, KeyError):
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        version = f" (v{state['policy_version']})"
    return f"policy of step {int(step[1])}{version}, {at_hand(checkpoint.parents[1])}"


def config_file_of(policy: str) -> Path | None:
    """Return the config.json of the run that a run folder, or a model below one, belongs to."""
    folder = Path(policy).expanduser().resolve()
    return next(
        (place / CONFIG_FILE for place in (folder, *folder.parents) if is_run_folder(place)), None
    )
