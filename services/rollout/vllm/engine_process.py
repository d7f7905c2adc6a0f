"""The process that vLLM's engine runs in: how it starts, its environment, why it ended."""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from agent_r1.rollout.policy import EngineWork, PolicySetupError
from agent_r1.rollout.vllm.engine_weights import adapter_args
from agent_r1.rollout.vllm.settings import (
    OUT_OF_MEMORY_REMEDY,
    PLUGIN,
    ModelFacts,
    ModelRunner,
    VllmSettings,
    check_cpu_fit,
    choose_model_runner,
)
from agent_r1.runtime.imports import quick_imports
from agent_r1.runtime.memory import GIB

CPU_BATCHED_TOKENS = 2048
_PR_SET_PDEATHSIG = 1
EXIT_TIMEOUT_S = 3.0
SIGKILL_EXIT_CODE = -9
RELEASE = "0.32"
_INSTALL = (
    f"install release {RELEASE}, which this version is made for: pip install 'agent-r1[rollout]' "
    "(CPU) or 'agent-r1[rollout-gpu]'"
)


@dataclass(frozen=True)
class StartedEngine:
    """An engine, and what the policy must know of it."""

    engine: Any
    """vLLM's AsyncLLM."""
    model_runner: ModelRunner
    sends_whole_answers: bool
    """Tokens arrive when their answer is finished, not one by one."""
    description: str
    """Settings that vLLM chose or was given, for the log."""


def check_release() -> None:
    """Refuse an installation of vLLM that this version is not made for.

    Raises:
        PolicySetupError: another release, or none, or this project is not installed.
    """
    try:
        with quick_imports():
            import vllm
            from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401 - imports all that follows
    except ImportError as exc:
        raise PolicySetupError(f"vLLM cannot be used ({exc}); {_INSTALL}") from exc
    installed = vllm.__version__
    if not installed.startswith(f"{RELEASE}."):
        raise PolicySetupError(f"vLLM is release {installed}; {_INSTALL}")
    # vLLM's own processes find our weight transfer by it.
    if PLUGIN not in {entry.name for entry in entry_points(group="vllm.general_plugins")}:
        raise PolicySetupError(
            f"vLLM's processes cannot find the entry point {PLUGIN}; install this project "
            "(pip install -e .) instead of only putting it on the import path"
        )


def start_engine(settings: VllmSettings, facts: ModelFacts, work: EngineWork) -> StartedEngine:
    """Start an engine; it takes seconds, and blocks. `check_release` comes first.

    Args:
        settings: of the engine.
        facts: of its model.
        work: counts what it does from now on.

    Raises:
        PolicySetupError: the settings or the memory do not allow it.
    """
    with quick_imports():
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        args = _engine_args(settings, facts, on_cpu=on_cpu)
    runner = choose_model_runner(settings.rollout.model_runner, on_cpu=on_cpu)
    if on_cpu:
        check_cpu_fit(settings, facts)
        with quick_imports():  # before the fork, so that the engine shares these pages
            _import_models(facts.architectures)
    return launch_engine(
        args, settings, work, runner, forks=on_cpu and settings.rollout.tensor_parallel_size == 1
    )


def launch_engine(
    args: Any, settings: VllmSettings, work: EngineWork, runner: ModelRunner, *, forks: bool
) -> StartedEngine:
    """Start an engine from vLLM's own arguments.

    Args:
        args: vLLM's AsyncEngineArgs.
        settings: the engine's environment is made from them.
        work: counts what the engine does.
        runner: vLLM's model runner.
        forks: its process is forked from this one instead of spawned.

    Raises:
        PolicySetupError: vLLM refuses the arguments, or the engine ends while it starts.
    """
    with quick_imports():
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
    try:
        with _engine_environment(settings, runner, compiled=not args.enforce_eager):
            with quick_imports():
                # Without a context vLLM takes 2,048 tokens a step on every GPU.
                config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
            chosen = "v2" if config.use_v2_model_runner else "v1"  # by the environment
            loggers: list[Any] = [_counting_logger(work)]
            with forked_processes(settings) if forks else nullcontext():
                engine = AsyncLLM.from_vllm_config(
                    config, stat_loggers=loggers, disable_log_stats=True
                )
    except (RuntimeError, ValueError, OSError) as exc:
        raise PolicySetupError(
            f"the engine did not start: {exc} (the lines it logged before say more). If it "
            f"ran out of memory: {OUT_OF_MEMORY_REMEDY}"
        ) from exc
    return StartedEngine(
        engine,
        model_runner=chosen,
        sends_whole_answers=args.scheduler_cls is not None,
        description=_describe(config),
    )


def _counting_logger(work: EngineWork) -> Any:
    """Return a stat logger for `AsyncLLM` that counts each step into `work`, and nothing else."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class CountingLogger(PrometheusStatLogger):
        """In place of vLLM's own, which keeps some fifty metrics for each step.

        vLLM adds its own beside any logger that is not of this class.
        """

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            """Keep nothing: `work` is all there is."""

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if scheduler_stats is not None:
                work.steps += 1
                work.running = scheduler_stats.num_running_reqs
                work.waiting = (
                    scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
                )
                work.kv_cache_used = scheduler_stats.kv_cache_usage
            if iteration_stats is not None:
                work.prompt_tokens += iteration_stats.prompt_token_stats.computed
                work.sampled_tokens += iteration_stats.num_generation_tokens

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

        def record_admission_rejection(self, reason: str) -> None: ...

        def log_engine_initialized(self) -> None: ...

    return CountingLogger


def _describe(config: Any) -> str:
    scheduler, cache = config.scheduler_config, config.cache_config
    return (
        f"asynchronous={scheduler.async_scheduling} "
        f"max_batched_tokens={scheduler.max_num_batched_tokens} "
        f"max_num_seqs={scheduler.max_num_seqs} block_size={cache.block_size} "
        f"graphs={config.compilation_config.cudagraph_mode.name}"
    )


def _engine_args(settings: VllmSettings, facts: ModelFacts, *, on_cpu: bool) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from agent_r1.rollout.vllm.weight_transfer import BACKEND

    model, rollout = settings.model, settings.rollout
    platform: dict[str, Any] = {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_batched_tokens": rollout.max_batched_tokens,
    }
    if on_cpu:
        platform = _cpu_args(settings, facts)
    eager, sequences = rollout.enforce_eager, rollout.max_num_seqs or rollout.max_concurrent
    return AsyncEngineArgs(
        model=str(facts.directory),
        dtype=model.dtype,
        seed=settings.seed,
        skip_tokenizer_init=True,
        max_model_len=model.max_context,
        # Which sequences share a step, and which prefixes are cached, changes last digits.
        max_num_seqs=1 if settings.deterministic else sequences,
        enable_prefix_caching=not settings.deterministic,
        tensor_parallel_size=rollout.tensor_parallel_size,
        enforce_eager=on_cpu if eager is None else eager,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=f"{__package__}.weight_transfer.LoadOpenedFiles",
        disable_log_stats=True,
        **platform,
        **({} if model.lora is None else adapter_args(model.lora)),
    )


def _cpu_args(settings: VllmSettings, facts: ModelFacts) -> dict[str, Any]:
    """Return the arguments that only a CPU engine has."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from agent_r1.rollout.vllm.cpu.norms import NORMS

    model, rollout = settings.model, settings.rollout
    batched_tokens = max(rollout.max_batched_tokens or CPU_BATCHED_TOKENS, model.max_context)
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": int(rollout.kv_cache_gib * GIB),
        "max_num_batched_tokens": batched_tokens,
        # A seeded request that is prefilled in chunks ends a CPU engine ("CPU Generator does not
        # use offset"), so a prompt must fit one step.
        "enable_chunked_prefill": False,
        # The least that its attention takes. Only whole blocks of a prefix are found again, and
        # vLLM's own 128 tokens are more than a short turn has.
        "block_size": 32,
        "worker_cls": f"{__package__}.cpu.worker.FastCPUWorker",
        "scheduler_cls": f"{__package__}.cpu.answer_scheduler.WholeAnswerScheduler",
        "ir_op_priority": {"rms_norm": [NORMS], "fused_add_rms_norm": [NORMS]},
    }
    if rollout.tensor_parallel_size == 1:
        # By default a CPU engine puts its one worker into a third process.
        arguments["distributed_executor_backend"] = UniProcExecutor
    return arguments


def _engine_environment(
    settings: VllmSettings, runner: ModelRunner, *, compiled: bool
) -> AbstractContextManager[None]:
    """Set, for the engine processes started inside, what concerns no other process."""
    wanted = {
        "OMP_NUM_THREADS": str(settings.rollout.threads),
        "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")),
    }
    if not compiled:
        # An eager engine still compiles its log-probability ranks on the first request: seconds,
        # and a C++ compiler that a machine may lack.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    return _environment(wanted)


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _import_models(architectures: Sequence[str]) -> None:
    """Import the classes of a model, which the engine uses, and tell vLLM what they can do.

    Otherwise vLLM finds that out in a process of its own, which imports everything once more: as
    much CPU time as the whole start takes, wherever ~/.cache/vllm does not have the answer, as in a
    container.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for name in architectures:
        if name in ModelRegistry.models:  # else vLLM says which there are
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextmanager
def forked_processes(settings: VllmSettings) -> Iterator[None]:
    """Have the engine process started inside forked, with all that this process has imported.

    vLLM spawns the engine of a CPU, which then imports PyTorch and vLLM again: 10 of the 13 seconds
    of CPU time that its start takes. Enter once its configuration exists (that is what asks for
    spawning), in a thread that has computed nothing: the new process has that thread alone, and
    OpenMP serves each thread with helpers of its own.
    """
    fork = _Fork(settings)  # known to multiprocessing for as long as it lives
    multiprocessing.util.register_after_fork(fork, _Fork.set_up)
    with _environment({"VLLM_WORKER_MULTIPROC_METHOD": "fork"}):
        yield


class _Fork:
    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings

    def set_up(self) -> None:
        """Undo what belongs to the parent, and do what an import in a new process would do."""
        import torch

        die_with_server()
        leave_connections()
        signal.set_wakeup_fd(-1)  # else a signal sent to the engine reaches the server's event loop
        warnings.simplefilter("ignore", FutureWarning)  # of vLLM about PyTorch, for every start
        torch.set_num_threads(self._settings.rollout.threads)
        if self._settings.rollout.enforce_eager is not False:
            torch.compiler.set_stance("force_eager")


def leave_connections() -> None:
    """Give up the network sockets of the process that this one was forked from.

    A port stays taken, and its callers wait, while any process holds the socket that listens there;
    and whoever takes over an engine must not find connections to Redis and the tools in it. Their
    numbers stay taken: objects that the parent made may still close them.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if _is_network_socket(int(name)):
            os.dup2(nowhere, int(name), inheritable=False)
    os.close(nowhere)


def _is_network_socket(number: int) -> bool:
    try:
        one = socket.socket(fileno=number)
    except OSError:  # no socket, or the one that listed the numbers, which is closed by now
        return False
    family = one.family
    one.detach()
    return family in (socket.AF_INET, socket.AF_INET6)


def die_with_server() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends.

    An engine notices nothing of the end of a server that was killed: it would stay forever.
    """
    server = multiprocessing.parent_process()
    if server is None:  # this is the server
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != server.pid:  # it has ended already
        os._exit(1)


def wait_for_exit(engine: Any) -> None:
    """Wait a moment until a dying engine process has ended, so that its exit code is known."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for process in engine_processes(engine):
        process.join(max(0.0, deadline - time.monotonic()))


def engine_processes(engine: Any) -> list[Any]:
    """Return the engine's own processes."""
    manager = getattr(engine.engine_core.resources, "engine_manager", None)
    return list(getattr(manager, "processes", []))


def death_reason(engine: Any) -> str:
    """Say in one line why the engine process ended."""
    codes = [process.exitcode for process in engine_processes(engine)]
    if SIGKILL_EXIT_CODE in codes:
        return (
            "the engine process was killed (signal 9), most likely because it ran out of memory: "
            f"{OUT_OF_MEMORY_REMEDY}"
        )
    return (
        f"the engine process ended (exit codes {codes}); the lines it logged before give the reason"
    )
