"""Every name of vLLM, DeepSpeed, transformers and peft that this project relies on, looked up.

    python scripts/vendor_names.py [--vllm FOLDER]

FOLDER holds an unpacked wheel of vLLM (`pip download --no-deps vllm==0.32.0`, then `unzip`), such
as that for GPUs: vLLM is read, not imported, so its libraries may be missing. Without FOLDER, the
installed vLLM is read. The other packages are the same release in both locks, and are imported.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("services", "proto", "deploy")
PACKAGES = ("vllm", "deepspeed", "transformers", "peft")
ATTRIBUTES = """
vllm.v1.engine.async_llm AsyncLLM.abort
vllm.v1.engine.async_llm AsyncLLM.add_lora
vllm.v1.engine.async_llm AsyncLLM.collective_rpc
vllm.v1.engine.async_llm AsyncLLM.engine_core
vllm.v1.engine.async_llm AsyncLLM.errored
vllm.v1.engine.async_llm AsyncLLM.from_vllm_config
vllm.v1.engine.async_llm AsyncLLM.generate
vllm.v1.engine.async_llm AsyncLLM.init_weight_transfer_engine
vllm.v1.engine.async_llm AsyncLLM.is_paused
vllm.v1.engine.async_llm AsyncLLM.output_handler
vllm.v1.engine.async_llm AsyncLLM.output_processor
vllm.v1.engine.async_llm AsyncLLM.resume_generation
vllm.v1.engine.async_llm AsyncLLM.shutdown
vllm.v1.engine.async_llm AsyncLLM.update_weight_version
vllm.v1.engine.core_client AsyncMPClient.pause_scheduler_async
vllm.v1.engine.core_client MPClient.resources
vllm.v1.engine.core_client BackgroundResources.engine_manager
vllm.v1.engine.utils CoreEngineProcManager.processes
vllm.v1.engine.output_processor OutputProcessor.request_states
vllm.v1.engine.output_processor RequestState.external_req_id
vllm.v1.engine EngineCoreOutput.prefill_stats
vllm.v1.engine EngineCoreOutput.new_prompt_logprobs_tensors
vllm.outputs CompletionOutput.weight_versions
vllm.outputs RequestOutput.num_cached_tokens
vllm.outputs RequestOutput.prompt_logprobs
vllm.logprobs FlatLogprobs.start_indices
vllm.config.vllm VllmConfig.use_v2_model_runner
vllm.config.scheduler SchedulerConfig.async_scheduling
vllm.config.scheduler SchedulerConfig.max_num_batched_tokens
vllm.config.cache CacheConfig.block_size
vllm.config.compilation CompilationConfig.cudagraph_mode
vllm.engine.arg_utils AsyncEngineArgs.create_engine_config
vllm.engine.arg_utils EngineArgs.distributed_executor_backend
vllm.engine.arg_utils EngineArgs.enable_chunked_prefill
vllm.engine.arg_utils EngineArgs.hf_overrides
vllm.engine.arg_utils EngineArgs.ir_op_priority
vllm.engine.arg_utils EngineArgs.kv_cache_memory_bytes
vllm.engine.arg_utils EngineArgs.load_format
vllm.engine.arg_utils EngineArgs.logprobs_mode
vllm.engine.arg_utils EngineArgs.scheduler_cls
vllm.engine.arg_utils EngineArgs.weight_transfer_config
vllm.engine.arg_utils EngineArgs.worker_cls
vllm.engine.arg_utils EngineArgs.worker_extension_cls
vllm.sampling_params SamplingParams.flat_logprobs
vllm.sampling_params SamplingParams.skip_clone
vllm.sampling_params SamplingParams.skip_reading_prefix_cache
vllm.sampling_params _MAX_TEMP
vllm.envs VLLM_USE_V2_MODEL_RUNNER
vllm.envs VLLM_ENGINE_READY_TIMEOUT_S
vllm.envs VLLM_WORKER_MULTIPROC_METHOD
vllm.distributed.weight_transfer.base WeightTransferEngine.parse_update_info
vllm.distributed.weight_transfer.base WeightTransferEngine.finish_weight_update
vllm.distributed.weight_transfer.base WeightTransferEngine.receive_weights
vllm.distributed.weight_transfer.base WeightTransferEngine.start_weight_update
vllm.distributed.weight_transfer.factory WeightTransferEngineFactory._registry
vllm.distributed.weight_transfer.factory WeightTransferEngineFactory.register_engine
vllm.v1.core.sched.scheduler Scheduler.update_from_output
vllm.v1.core.sched.scheduler Scheduler.finish_requests
vllm.v1.metrics.loggers PrometheusStatLogger.record
vllm.v1.metrics.loggers PrometheusStatLogger.record_sleep_state
vllm.v1.metrics.loggers PrometheusStatLogger.record_admission_rejection
vllm.v1.metrics.loggers PrometheusStatLogger.log_engine_initialized
vllm.v1.metrics.stats SchedulerStats.num_running_reqs
vllm.v1.metrics.stats SchedulerStats.num_waiting_reqs
vllm.v1.metrics.stats SchedulerStats.num_skipped_waiting_reqs
vllm.v1.metrics.stats SchedulerStats.kv_cache_usage
vllm.v1.metrics.stats IterationStats.num_generation_tokens
vllm.v1.metrics.stats IterationStats.prompt_token_stats
vllm.v1.metrics.stats PromptTokenStats.computed
vllm.model_executor.models.registry _ModelRegistry.models
vllm.model_executor.models.registry _ModelRegistry.register_model
vllm.model_executor.models.registry _BaseRegisteredModel.load_model_cls
vllm.lora.punica_wrapper.punica_base PunicaWrapperBase.no_lora
vllm.lora.punica_wrapper.punica_cpu PunicaWrapperCPU.add_lora_linear
vllm.lora.request LoRARequest.load_inplace
vllm.v1.worker.cpu_worker CPUWorker.init_device
vllm.v1.worker.gpu_model_runner GPUModelRunner.input_batch
vllm.v1.worker.gpu_model_runner GPUModelRunner.requests
vllm.v1.worker.gpu_input_batch CachedRequestState.output_token_ids
vllm.v1.worker.gpu_input_batch CachedRequestState.sampling_params
vllm.v1.worker.gpu_input_batch InputBatch.num_reqs
vllm.v1.worker.gpu_input_batch InputBatch.num_tokens_no_spec
vllm.v1.worker.gpu_input_batch InputBatch.req_ids
vllm.v1.worker.gpu_input_batch InputBatch.num_prompt_tokens
vllm.v1.worker.gpu_model_runner GPUModelRunner.sampler
vllm.v1.sample.metadata SamplingMetadata.all_random
vllm.v1.sample.metadata SamplingMetadata.logitsprocs
vllm.v1.sample.metadata SamplingMetadata.temperature
vllm.v1.sample.metadata SamplingMetadata.top_k
vllm.v1.sample.metadata SamplingMetadata.top_p
vllm.v1.sample.logits_processor.state LogitsProcessors.argmax_invariant
vllm.v1.sample.sampler Sampler.apply_temperature
deepspeed.runtime.engine DeepSpeedEngine.get_global_grad_norm
deepspeed.runtime.engine DeepSpeedEngine.set_gradient_accumulation_boundary
deepspeed.runtime.engine DeepSpeedEngine.checkpoint_engine
deepspeed.runtime.zero.stage_1_and_2 DeepSpeedZeroOptimizer.update_lp_params
deepspeed.runtime.zero.stage_1_and_2 DeepSpeedZeroOptimizer._hp_optimizer_states_linked
deepspeed.runtime.zero.stage_1_and_2 DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state
deepspeed.runtime.zero.stage3 DeepSpeedZeroOptimizer_Stage3.fp32_partitioned_groups_flat
deepspeed.ops __compatible_ops__
deepspeed.runtime.zero.partition_parameters Init
deepspeed.runtime.zero.partition_parameters Init.all_gather
deepspeed.runtime.zero.partition_parameters Init.convert_to_zero_parameters
deepspeed.runtime.zero.partition_parameters Init.ds_id
deepspeed.runtime.zero.partition_parameters Init.ds_numel
deepspeed.runtime.zero.partition_parameters Init.ds_shape
deepspeed.runtime.zero.partition_parameters Init.ds_tensor
deepspeed.runtime.zero.partition_parameters Init.partition
transformers PreTrainedModel.get_decoder
transformers PreTrainedModel.set_attn_implementation
transformers PreTrainedModel.gradient_checkpointing_enable
transformers PreTrainedModel.enable_input_require_grads
transformers PretrainedConfig._attn_implementation
transformers.core_model_loading "HF_DEACTIVATE_ASYNC_LOAD"
peft.tuners.tuners_utils BaseTunerLayer.enable_adapters
"""
"""Module, then class and attribute: what is used of an object, where no import says so. A class may
give the attribute to objects of others, as DeepSpeed's `Init` does. In quotes: a variable of the
environment that the module reads."""


def imported(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import from the packages, and what is used of `deepspeed.`."""
    files = (file for folder in SOURCES for file in sorted((root / folder).rglob("*.py")))
    for node in (node for file in files for node in ast.walk(_parsed(file))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            yield from ((str(node.module), alias.name) for alias in node.names)
        if isinstance(node, ast.Attribute) and (path := ast.unparse(node)).startswith("deepspeed."):
            yield "deepspeed", path.removeprefix("deepspeed.")


def all_names() -> list[tuple[str, str]]:
    """Return module and dotted path of every name, each once."""
    listed = [tuple(line.split()) for line in ATTRIBUTES.strip().splitlines()]
    return sorted({*imported(), *((module, path) for module, path in listed)})


def is_there(module: str, path: str, vllm: Path) -> bool:
    """Return whether a module has a name; of vLLM as the sources in a folder say."""
    if module.split(".")[0] == "vllm":
        return Source(vllm).has(module, path)
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    if path.startswith('"'):
        return path in inspect.getsource(found)
    for name in path.split("."):
        if hasattr(found, name):
            found = getattr(found, name)
        elif not (inspect.isclass(found) and _is_assigned(found, name)):
            return False
    return True


def _is_assigned(owner: type, name: str) -> bool:
    sources = (inspect.getsource(one) for one in owner.__mro__[:-1])
    return any(re.search(rf"\w\.{name}\b.* = ", source) for source in sources)


class Source:
    """The sources of a package, read without importing it.

    Args:
        root: the folder that holds the package.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, module: str, path: str) -> bool:
        """Return whether a module defines or imports a name, or a class of it an attribute."""
        first, _, attribute = path.partition(".")
        found = self._find(module, first)
        if found is None:
            return (self._file(f"{module}.{first}") is not None) and not attribute
        return not attribute or self._has_attribute(*found, attribute)

    def _file(self, module: str) -> Path | None:
        base = self._root.joinpath(*module.split("."))
        places = (base.with_suffix(".py"), base / "__init__.py")
        return next((place for place in places if place.is_file()), None)

    def _find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module that defines a name, and the definition."""
        file = self._file(module)
        node = _definitions(file).get(name) if file else None
        if not isinstance(node, ast.ImportFrom):
            return None if node is None else (module, node)
        (alias,) = (alias for alias in node.names if name == (alias.asname or alias.name))
        return self._find(str(node.module), alias.name) or (module, node)

    def _has_attribute(self, module: str, owner: ast.AST, attribute: str) -> bool:
        for node in ast.walk(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == attribute:
                return True
            # A local variable of a method is no attribute.
            if isinstance(node, ast.Assign | ast.AnnAssign) and attribute in (
                _targets(node) if node in getattr(owner, "body", []) else _attributes(node)
            ):
                return True
        bases = owner.bases if isinstance(owner, ast.ClassDef) else []
        for base in bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self._find(module, base.id) if isinstance(base, ast.Name) else None
            if found and self._has_attribute(*found, attribute):
                return True
        return False


@functools.cache
def _definitions(file: Path) -> dict[str, ast.AST]:
    """Return what a module defines or imports, at any depth; the first counts."""
    found: dict[str, ast.AST] = {}
    for node in ast.walk(_parsed(file)):
        names: Iterable[str] = ()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = _targets(node)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.asname or alias.name for alias in node.names]
        for name in names:
            found.setdefault(name, node)
    return found


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """Return the names, and the attributes of `self`, that an assignment sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names | {part.attr for part in parts if isinstance(part, ast.Attribute)}


def _attributes(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """Return the attributes that an assignment sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    return {part.attr for part in parts if isinstance(part, ast.Attribute)}


def installed_vllm() -> Path:
    """Return the folder that holds the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def main() -> int:
    """Print the names that are missing; 1 where there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", type=Path, help="folder of an unpacked wheel of vLLM")
    folder: Path = parser.parse_args().vllm or installed_vllm()
    if not (folder / "vllm" / "__init__.py").is_file():
        parser.error(f"{folder} holds no vllm; unpack a wheel of vLLM there")
    names = all_names()
    missing = [f"{module} {path}" for module, path in names if not is_there(module, path, folder)]
    for name in missing:
        print(f"missing: {name}")
    print(f"{len(names) - len(missing)} of {len(names)} names are there ({folder})")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
