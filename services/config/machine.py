"""Checks of the machine that a configuration will run on: GPUs, folders, ports, servers.

checks.py asks; `agent-r1 check --elsewhere` leaves it out, for a configuration that another machine
will run.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from agent_r1.config.findings import Check
from agent_r1.config.gpu_checks import (
    check_gpus,
    dtype_problem,
    num_shown,
    unused_gpus,
)
from agent_r1.config.packages import flash_attention_problem, installed_version
from agent_r1.config.placement import place
from agent_r1.config.redis_server import ANSWER_TIMEOUT_S, check_run_redis
from agent_r1.config.run import SUPERVISED, Config
from agent_r1.config.sources import ConfigError
from agent_r1.learner.config import EngineConfig
from agent_r1.rollout.policy import PolicySetupError
from agent_r1.rollout.vllm.settings import choose_model_runner
from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.files.disk_space import free_bytes, nearest_existing, readable_size
from agent_r1.runtime.files.run_folder import CHECKPOINTS_DIR
from agent_r1.runtime.files.tasks import TaskFileError
from agent_r1.runtime.http.token import TOKEN_SOURCES, RunToken, find_token, token_headers
from agent_r1.runtime.imports import MissingPackageError
from agent_r1.tools.search.config import SearchConfig
from agent_r1_proto.tools import ToolSpec

Purpose = Literal["train", "evaluate", "sft", "train_reward", "serve"]
"""The command that a configuration is checked for."""

SANDBOXED = ("python_exec", "code_tests")
"""Types of tools that run the model's code."""
STATE_BYTES = 16
"""Bytes of a checkpoint for each weight: float32 weights, AdamW's two moments, the model."""
WIDEST_VALUE_BYTES = 4
"""Most bytes of a weight in the model's files."""


def check_machine(
    config: Config, purpose: Purpose, *, resume: bool, specs: dict[str, ToolSpec]
) -> Iterator[Check]:
    """Look at what this machine has for a configuration.

    Args:
        config: the configuration.
        purpose: the command that will run.
        resume: the run folder may hold a run.
        specs: gets those of tools that run elsewhere.
    """
    gpu_problems = list(_gpu_problems(config, purpose))
    gpu_problems = gpu_problems or list(_placement_problems(config, purpose))
    yield Check("GPUs", describe_gpus(), gpu_problems)
    if not _trains_on_cpu(config, purpose):
        yield from check_gpus()
    if purpose == "train":
        folder = config.run.folder()
        yield Check("disk", describe_disk(folder), list(_folder_problems(config, resume=resume)))
        if config.learner.checkpoint_url is not None:
            problems = list(_store_problems(config, resume=resume))
            yield Check("checkpoint store", config.learner.checkpoint_url, problems)
        elif resume:  # a store may have a newer one
            yield Check("checkpoint", str(folder), list(_checkpoint_problems(config)))
    if purpose in SUPERVISED:
        return
    yield check_model_runner(config)
    token: RunToken | None = None
    token_problems: list[str] = []
    try:
        token = find_token(config.run)
    except ValueError as exc:
        token_problems.append(str(exc))
    yield Check("run token", "given" if token else "made for each start", token_problems)
    yield from check_run_redis(config, trains=purpose == "train")
    yield _check_ports(config, trains=purpose == "train")
    tool_problems = list(_tool_problems(config, specs, token))
    yield Check("tools", ", ".join(config.tools) or "none", tool_problems)
    for tool in config.served_tools().values():
        if tool.type in SANDBOXED and tool.settings.get("sandbox") != "container":
            configured = tool.settings.get("bwrap")
            yield check_sandbox(str(configured) if configured else None)
            break


def check_model_runner(config: Config) -> Check:
    """Say which of vLLM's model runners will sample here."""
    on_cpu = usable_gpus() == 0
    try:
        runner = choose_model_runner(config.rollout.model_runner, on_cpu=on_cpu)
    except PolicySetupError as exc:
        unused = unused_gpus()
        why = str(exc) if unused is None else f'rollout.model_runner ("v2") needs GPUs: {unused}'
        return Check("model runner", "", [why])
    return Check("model runner", f"vLLM's {runner}, on {'the CPU' if on_cpu else 'GPUs'}")


def _check_ports(config: Config, *, trains: bool) -> Check:
    from agent_r1.runtime.http.serving import bind_unprotected

    problems: list[str] = []
    fixed = [(key, one) for key, one in listeners(config, trains=trains) if one.port]
    for key, listen in fixed:
        try:
            bind_unprotected(key, listen).close()
        except ValueError as exc:
            problems.append(str(exc))
    shown = ", ".join(f"{key} {listen.port}" for key, listen in fixed)
    return Check("ports", shown or "each service takes a free one", problems)


def check_sandbox(bwrap: str | None = None) -> Check:
    """Return the program that isolates the model's code; `bwrap` is the configured one."""
    from agent_r1.sandbox.bubblewrap import find_bwrap

    try:
        return Check("sandbox", find_bwrap(bwrap))
    except ValueError as exc:
        return Check("sandbox", "none", [str(exc)])


def describe_gpus() -> str:
    """Say how many GPUs there are, and which driver, or why they are not used."""
    count, shown = count_gpus(), num_shown()
    if unused_gpus() is not None:
        return f"{shown}, unused: the packages are for CPUs"
    if count == 0:
        none = "none: everything runs on the CPU"
        return none if shown == 0 else f"{shown}, and CUDA shows none of them"
    try:
        first, *_ = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        first = "an unknown driver"
    return f"{count}, {first.removeprefix('NVRM version:').strip()}"


def describe_disk(folder: Path) -> str:
    """Say how much of a folder's disk is free, and of /dev/shm."""
    free = free_bytes(folder)
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0
    return f"{readable_size(free)} free for {folder}, {readable_size(shared)} of shared memory"


# --- GPUs ----------------------------------------------------------------------------------------


def count_gpus() -> int:
    """Return the number of GPUs that CUDA shows to this process, without importing torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def usable_gpus() -> int:
    """Return the number of GPUs that the installed packages can use."""
    return 0 if installed_version("torch").endswith("+cpu") else count_gpus()


def _trains_on_cpu(config: Config, purpose: Purpose) -> bool:
    """Say whether a command needs no GPU, and no engine."""
    table = config.supervised(purpose)
    return table is not None and (
        table.engine.device == "cpu" or (table.engine.device == "auto" and count_gpus() == 0)
    )


def _gpu_problems(config: Config, purpose: Purpose) -> Iterator[str]:
    tables: dict[str, EngineConfig] = {}
    if purpose == "train":
        tables["engine"] = config.engine
    if (supervised := config.supervised(purpose)) is not None:
        tables[f"{purpose}.engine"] = supervised.engine
    for name, table in tables.items():
        if table.device != "cuda":
            continue
        found = count_gpus()
        if (unused := unused_gpus()) is not None:
            yield f'{name}.device ("cuda") cannot be had: {unused}'
        elif found == 0:
            yield (
                f'{name}.device ("cuda") needs a GPU, and CUDA finds none here; set {name}.device '
                '= "cpu" or "auto", or check `nvidia-smi`'
            )
        elif table.ranks > found:
            yield (
                f"{name}.ranks ({table.ranks}) must be at most {found}, the GPUs of this machine; "
                "lower it"
            )
    if tables and (problem := flash_attention_problem(config.model.attention)) is not None:
        yield problem
    if usable_gpus() > 0 and (problem := dtype_problem(config.model.dtype)) is not None:
        yield problem
    learner = config.learner
    backend = learner.collective_backend if learner.transport == "collective" else "gloo"
    if purpose == "train" and backend != "gloo" and usable_gpus() == 0:
        yield (
            f'learner.collective_backend ("{backend}") needs GPUs for learner and rollout servers, '
            'and this machine has none that the packages can use; set "gloo"'
        )
    wanted = config.rollout.tensor_parallel_size
    if purpose in SUPERVISED or wanted == 1:
        return
    if (unused := unused_gpus()) is not None:
        yield f"rollout.tensor_parallel_size ({wanted}) needs GPUs: {unused}"
    elif wanted > (found := count_gpus()):
        yield (
            f"rollout.tensor_parallel_size ({wanted}) must be at most {found}, the GPUs of this "
            "machine; lower it"
        )


def _placement_problems(config: Config, purpose: Purpose) -> Iterator[str]:
    if purpose not in ("train", "evaluate"):
        return
    try:
        place(config, num_gpus=usable_gpus(), trains=purpose == "train")
    except ValueError as exc:
        yield str(exc)


# --- Folders -------------------------------------------------------------------------------------


def _folder_problems(config: Config, *, resume: bool) -> Iterator[str]:
    from agent_r1.runtime.files.run_folder import run_folder_problem

    folder = config.run.folder()
    problem = run_folder_problem(folder, resume=resume)
    if problem is not None:
        yield problem
    for key, path in (
        ("run.dir", folder),
        ("learner.weights_dir", config.learner.weights_dir),
        ("rollout.weights_dir", config.rollout.weights_dir),
    ):
        if path is not None and (problem := _unwritable(path, key)) is not None:
            yield problem
    need = checkpoint_bytes(config) * (config.learner.keep_last + config.learner.keep_best + 1)
    free = free_bytes(folder)
    if not resume and free < need:
        yield (
            f"run.dir ({folder}) has {readable_size(free)} of free disk, and checkpoints take at "
            f"least {readable_size(need)}; free space, or lower learner.keep_last "
            f"({config.learner.keep_last}) and learner.keep_best ({config.learner.keep_best})"
        )


def checkpoint_bytes(config: Config) -> int:
    """Estimate the least size of one checkpoint; 0 where the model is not a folder here."""
    files = Path(config.model.path).glob("*.safetensors")
    weights = sum(file.stat().st_size for file in files)
    policy = 1 if config.model.lora is None else 0  # adapters take next to nothing
    models = policy + (1 if config.learner.has_critic else 0)
    return weights // WIDEST_VALUE_BYTES * STATE_BYTES * models


def _unwritable(path: Path, key: str) -> str | None:
    existing = nearest_existing(path)
    if not existing.is_dir():
        return f"{key} ({path}) cannot be created: {existing} is a file; name another folder"
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as exc:
        return f"{key} ({path}) cannot be written: {existing}: {exc.strerror}; name another folder"


def _store_problems(config: Config, *, resume: bool) -> Iterator[str]:
    from agent_r1.learner.checkpoints.object_store import StoreError
    from agent_r1.learner.checkpoints.run_store import open_run_store

    try:
        store = open_run_store(config.run, config.learner, resume=resume, retry_s=ANSWER_TIMEOUT_S)
        if store is not None:
            store.require_usable()
    except (StoreError, ValueError) as exc:
        yield f"learner.checkpoint_url: {exc}"


def _checkpoint_problems(config: Config) -> Iterator[str]:
    from agent_r1.learner.checkpoints.run_checkpoint import check_newest, check_prompts
    from agent_r1.learner.main import engine_setup

    # No checkpoint says whether prefixes are shared, and finding that out would import PyTorch.
    engine = config.engine.model_copy(update={"share_prefixes": False})
    setup = engine_setup(config.run, config.model, config.learner, engine)
    try:
        state = check_newest(config.run.folder() / CHECKPOINTS_DIR, setup.facts())
        if state is not None and config.data is not None:
            check_prompts(state, config.prompt_order().fingerprint())
    except (TaskFileError, MissingPackageError):
        return  # checks.py names it
    except ValueError as exc:
        yield str(exc)


# --- Servers and ports ---------------------------------------------------------------------------


def _tool_problems(
    config: Config, specs: dict[str, ToolSpec], token: RunToken | None
) -> Iterator[str]:
    for name, table in config.tools.items():
        if table.url is not None:
            try:
                specs[name] = remote_spec(name, table.url, token)
            except ConfigError as exc:
                yield str(exc)
        elif isinstance(table, SearchConfig) and table.corpus and table.backend == "bm25":
            folder = table.index_dir or table.corpus.parent / ".index"
            if not folder.exists() and (problem := _unwritable(folder, f"tools.{name}.index_dir")):
                yield problem


def remote_spec(name: str, url: str, token: RunToken | None) -> ToolSpec:
    """Ask a tool service what it is.

    Raises:
        ConfigError: it does not answer, refuses the token, or is not this tool.
    """
    import httpx
    from pydantic import ValidationError

    try:
        answer = httpx.get(
            f"{url.rstrip('/')}/spec",
            timeout=ANSWER_TIMEOUT_S,
            trust_env=False,
            headers=token_headers(token),
        )
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ConfigError(
                f"tools.{name}.url ({url}) does not accept this run's token; set "
                f"{TOKEN_SOURCES} to the token of the tool"
            )
        answer.raise_for_status()
        spec = ToolSpec.model_validate_json(answer.content)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise ConfigError(
            f"tools.{name}.url ({url}) does not answer: {exc or type(exc).__name__}; start the "
            "tool there, correct the URL, or remove it to start the tool with this run"
        ) from exc
    except ValidationError as exc:
        raise ConfigError(
            f"tools.{name}.url ({url}) is not a tool service: GET /spec does not describe a tool; "
            "correct the URL"
        ) from exc
    if spec.name != name:
        raise ConfigError(
            f"tools.{name}.url ({url}) is the service of the tool {spec.name!r}; call the table "
            f"[tools.{spec.name}] or correct the URL"
        )
    return spec


def listeners(config: Config, *, trains: bool) -> Iterator[tuple[str, ListenConfig]]:
    """Yield every table that a service of this run listens by, with its key."""
    for name, tool in config.started_tools().items():
        yield f"tools.{name}", tool
    if config.agent is not None:
        yield "agent.service", config.agent.service
        yield "agent.gateway", config.agent.gateway
    yield "reward", config.reward
    yield "rollout", config.rollout
    if trains:
        yield "learner.server", config.learner.server
        yield "placement.metrics_server", config.placement.metrics_server
