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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("services", "proto", "deploy")
PACKAGES = ("vllm", "deepspeed", "transformers", "peft")
MODULES = ("vllm", "deepspeed", "peft")
"""Of these, what our code imports whole."""
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
vllm.v1.engine EngineCoreOutput.request_id
vllm.v1.engine EngineCoreOutput.finish_reason
vllm.v1.engine EngineCoreOutput.new_token_ids
vllm.v1.engine EngineCoreOutput.new_logprobs
vllm.v1.engine EngineCoreOutput.events
vllm.v1.engine EngineCoreOutputs.outputs
vllm.outputs CompletionOutput.weight_versions
vllm.outputs WeightVersionSpan.version
vllm.outputs WeightVersionSpan.start
vllm.outputs WeightVersionSpan.end
vllm.outputs CompletionOutput.finish_reason
vllm.outputs CompletionOutput.logprobs
vllm.outputs CompletionOutput.token_ids
vllm.outputs RequestOutput.num_cached_tokens
vllm.outputs RequestOutput.prompt_logprobs
vllm.outputs RequestOutput.outputs
vllm.logprobs FlatLogprobs.start_indices
vllm.logprobs FlatLogprobs.logprobs
vllm.config.vllm VllmConfig.use_v2_model_runner
vllm.config.vllm VllmConfig.cache_config
vllm.config.vllm VllmConfig.compilation_config
vllm.config.vllm VllmConfig.lora_config
vllm.config.vllm VllmConfig.scheduler_config
vllm.config.scheduler SchedulerConfig.async_scheduling
vllm.config.scheduler SchedulerConfig.max_num_batched_tokens
vllm.config.scheduler SchedulerConfig.max_num_seqs
vllm.config.cache CacheConfig.block_size
vllm.config.compilation CompilationConfig.cudagraph_mode
vllm.engine.arg_utils AsyncEngineArgs.create_engine_config
vllm.engine.arg_utils EngineArgs.distributed_executor_backend
vllm.engine.arg_utils EngineArgs.enable_chunked_prefill
vllm.engine.arg_utils EngineArgs.ir_op_priority
vllm.engine.arg_utils EngineArgs.kv_cache_memory_bytes
vllm.engine.arg_utils EngineArgs.logprobs_mode
vllm.engine.arg_utils EngineArgs.scheduler_cls
vllm.engine.arg_utils EngineArgs.weight_transfer_config
vllm.engine.arg_utils EngineArgs.worker_cls
vllm.engine.arg_utils EngineArgs.worker_extension_cls
vllm.engine.arg_utils EngineArgs.block_size
vllm.engine.arg_utils EngineArgs.enable_lora
vllm.engine.arg_utils EngineArgs.gpu_memory_utilization
vllm.engine.arg_utils EngineArgs.lora_target_modules
vllm.engine.arg_utils EngineArgs.max_lora_rank
vllm.engine.arg_utils EngineArgs.max_loras
vllm.engine.arg_utils EngineArgs.max_num_batched_tokens
vllm.sampling_params SamplingParams.flat_logprobs
vllm.sampling_params SamplingParams.skip_clone
vllm.sampling_params SamplingParams.skip_reading_prefix_cache
vllm.sampling_params SamplingParams.num_logprobs
vllm.sampling_params SamplingParams.output_kind
vllm.sampling_params SamplingParams.seed
vllm.sampling_params _MAX_TEMP
vllm.envs VLLM_USE_V2_MODEL_RUNNER
vllm.envs VLLM_ENGINE_READY_TIMEOUT_S
vllm.envs VLLM_WORKER_MULTIPROC_METHOD
vllm.envs VLLM_CPU_OMP_THREADS_BIND
vllm.envs VLLM_DO_NOT_TRACK
vllm.envs VLLM_LOGGING_LEVEL
vllm.envs VLLM_NO_USAGE_STATS
vllm.envs VLLM_PLUGINS
vllm.distributed.weight_transfer.base WeightTransferEngine.parse_update_info
vllm.distributed.weight_transfer.base WeightTransferEngine.finish_weight_update
vllm.distributed.weight_transfer.base WeightTransferEngine.receive_weights
vllm.distributed.weight_transfer.base WeightTransferEngine.start_weight_update
vllm.distributed.weight_transfer.base WeightTransferEngine.device
vllm.distributed.weight_transfer.base WeightTransferEngine.init_info_cls
vllm.distributed.weight_transfer.base WeightTransferEngine.init_transfer_engine
vllm.distributed.weight_transfer.base WeightTransferEngine.model
vllm.distributed.weight_transfer.base WeightTransferEngine.model_config
vllm.distributed.weight_transfer.base WeightTransferEngine.shutdown
vllm.distributed.weight_transfer.base WeightTransferEngine.supports_draft_weight_update
vllm.distributed.weight_transfer.base WeightTransferEngine.update_info_cls
vllm.distributed.weight_transfer.base WeightTransferEngine.update_weights
vllm.distributed.weight_transfer.factory WeightTransferEngineFactory._registry
vllm.distributed.weight_transfer.factory WeightTransferEngineFactory.register_engine
vllm.v1.core.sched.scheduler Scheduler.update_from_output
vllm.v1.core.sched.scheduler Scheduler.finish_requests
vllm.v1.core.sched.scheduler Scheduler.requests
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
vllm.v1.worker.cpu_worker CPUWorker.model_runner
vllm.v1.worker.cpu_worker CPUWorker.vllm_config
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
vllm.v1.sample.sampler Sampler.gather_logprobs
vllm.v1.sample.sampler Sampler.logprobs_mode
vllm.v1.sample.sampler Sampler.sample
vllm.v1.outputs LogprobsLists.logprob_token_ids
vllm.v1.outputs LogprobsLists.logprobs
vllm.v1.outputs LogprobsLists.sampled_token_ranks
vllm.v1.outputs ModelRunnerOutput.logprobs
vllm.v1.outputs ModelRunnerOutput.req_id_to_index
vllm.v1.core.sched.output SchedulerOutput.num_scheduled_tokens
vllm.v1.request Request.request_id
vllm.v1.request Request.sampling_params
vllm.model_executor.models.qwen2 Qwen2ForCausalLM.load_weights
vllm.ir.ops rms_norm
vllm.ir.ops fused_add_rms_norm
vllm.ir.op IrOp.impls
vllm.ir.op IrOp.register_impl
deepspeed.accelerator.real_accelerator "DS_ACCELERATOR"
deepspeed.runtime.engine DeepSpeedEngine.backward
deepspeed.runtime.engine DeepSpeedEngine.step
deepspeed.runtime.engine DeepSpeedEngine.get_global_grad_norm
deepspeed.runtime.engine DeepSpeedEngine.set_gradient_accumulation_boundary
deepspeed.runtime.engine DeepSpeedEngine.checkpoint_engine
deepspeed.runtime.engine DeepSpeedEngine.load_checkpoint
deepspeed.runtime.engine DeepSpeedEngine.module
deepspeed.runtime.engine DeepSpeedEngine.optimizer
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
transformers PreTrainedModel.base_model_prefix
transformers PreTrainedModel.config
transformers PreTrainedModel.generation_config
transformers PreTrainedModel.get_output_embeddings
transformers PreTrainedModel.save_pretrained
transformers PreTrainedModel.tie_weights
transformers PreTrainedTokenizerFast.is_fast
transformers PretrainedConfig._attn_implementation
transformers PretrainedConfig.architectures
transformers PretrainedConfig.num_labels
transformers PretrainedConfig.get_text_config
transformers PretrainedConfig.model_type
transformers PretrainedConfig.save_pretrained
transformers Qwen2Config.eos_token_id
transformers Qwen2Config.hidden_size
transformers Qwen2Config.max_position_embeddings
transformers Qwen2Config.num_key_value_heads
transformers Qwen3Config.head_dim
transformers Qwen2Config.num_attention_heads
transformers Qwen2Config.num_hidden_layers
transformers Qwen2Config.tie_word_embeddings
transformers.core_model_loading "HF_DEACTIVATE_ASYNC_LOAD"
transformers.modeling_outputs BaseModelOutputWithPast.last_hidden_state
transformers.modeling_outputs CausalLMOutputWithPast.logits
peft.tuners.tuners_utils BaseTunerLayer.enable_adapters
peft.tuners.tuners_utils BaseTuner.merge_and_unload
peft tuners
peft.tuners tuners_utils
peft.tuners.tuners_utils BaseTunerLayer
"""
"""Module, then class and attribute: what is used of an object, where no import says so. A class may
give the attribute to objects of others, as DeepSpeed's `Init` does. In quotes: a variable of the
environment that the module reads."""


def imported(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import from the packages, and what is used of each."""
    for file in (file for folder in SOURCES for file in sorted((root / folder).rglob("*.py"))):
        bound = dict(_bound(_parsed(file)))
        yield from bound.values()
        for node in ast.walk(_parsed(file)):
            if isinstance(node, ast.Attribute | ast.Call):
                yield from _uses(node, bound)


def _bound(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what a module calls each import from the packages, with its module and name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for alias in node.names:
                yield alias.asname or alias.name, (str(node.module), alias.name)


def _uses(node: ast.AST, bound: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield what an attribute, or the keywords of a call, use of an import or of `deepspeed.`."""
    if isinstance(node, ast.Call):
        for module, path in _uses_or_is(node.func, bound):
            keywords = (keyword.arg for keyword in node.keywords if keyword.arg is not None)
            yield from ((module, f"{path}({keyword})") for keyword in keywords)
    elif isinstance(node, ast.Attribute):
        path = ast.unparse(node)
        first, _, rest = path.partition(".")
        if first in MODULES and all(name.isidentifier() for name in path.split(".")):
            yield first, rest
        elif isinstance(node.value, ast.Name) and first in bound:
            module, name = bound[first]
            yield module, f"{name}.{rest}"


def _uses_or_is(node: ast.AST, bound: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Name) and node.id in bound:
        yield bound[node.id]
    yield from _uses(node, bound)


def all_names() -> list[tuple[str, str]]:
    """Return module and dotted path of every name, each once."""
    listed = [tuple(line.split()) for line in ATTRIBUTES.strip().splitlines()]
    return sorted({*imported(), *((module, path) for module, path in listed)})


def is_there(module: str, path: str, vllm: Path) -> bool:
    """Return whether a module has a name; of vLLM as the sources in a folder say.

    Args:
        module: of a package.
        path: a name in it, and an attribute of that; in parentheses, a parameter.
        vllm: the folder that holds vLLM.
    """
    if module.split(".")[0] == "vllm":
        return Source(vllm).has(module, path)
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    if path.startswith('"'):
        return path in inspect.getsource(found)
    names, _, parameter = path.rstrip(")").partition("(")
    for name in names.split("."):
        if hasattr(found, name):
            found = getattr(found, name)
        elif not (inspect.isclass(found) and _is_assigned(found, name)):
            return False
    return not parameter or _has_parameter(found, parameter)


def _has_parameter(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _is_assigned(owner: type, name: str) -> bool:
    sources = (inspect.getsource(one) for one in owner.__mro__[:-1])
    # DeepSpeed sets some past PyTorch's `__setattr__`.
    pattern = rf"(\w\.{name}\b|__dict__\['{name}'\]).* = "
    return any(re.search(pattern, source) for source in sources)


class Source:
    """The sources of a package, read without importing it.

    Args:
        root: the folder that holds the package.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, module: str, path: str) -> bool:
        """Return whether a module has a name, an attribute of it, and a parameter of that."""
        names, _, parameter = path.rstrip(")").partition("(")
        first, _, attribute = names.partition(".")
        found = self._find(module, first)
        if found is None:
            below = f"{module}.{first}"
            return self._file(below) is not None and (not attribute or self.has(below, attribute))
        if attribute:
            found = self._attribute(*found, attribute)
        return found is not None and (not parameter or self._takes(*found, parameter))

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
        return self._find(self._imported_from(module, node), alias.name) or (module, node)

    def _imported_from(self, module: str, node: ast.ImportFrom) -> str:
        """Return the module that an import names, absolute."""
        file = self._file(module)
        parts = module.split(".") + (["__init__"] if file and file.stem == "__init__" else [])
        package = parts[: -node.level] if node.level else []
        return ".".join([*package, str(node.module)])

    def _attribute(self, module: str, owner: ast.AST, name: str) -> tuple[str, ast.AST] | None:
        """Return the definition of an attribute of a class, or of the class of a variable."""
        if isinstance(owner, ast.ClassDef):
            if (node := _members(owner).get(name)) is not None:
                return module, node
            classes = owner.bases
        else:
            classes = _classes_of(owner)
        for one in classes:
            one = one.value if isinstance(one, ast.Subscript) else one
            base = self._find(module, one.id) if isinstance(one, ast.Name) else None
            if base and (found := self._attribute(*base, name)):
                return found
        return None

    def _takes(self, module: str, owner: ast.AST, parameter: str) -> bool:
        """Return whether a function, or a class when it is made, has a parameter."""
        if isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
            names = owner.args
            every = (*names.posonlyargs, *names.args, *names.kwonlyargs)
            return names.kwarg is not None or parameter in {one.arg for one in every}
        made = self._attribute(module, owner, "__init__")
        if made is not None:
            return self._takes(*made, parameter)
        return self._attribute(module, owner, parameter) is not None  # of a dataclass


def _in_scope(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, without those inside functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts = (getattr(node, name, []) for name in ("body", "orelse", "finalbody"))
            yield from _in_scope(one for part in parts for one in part)
            for handler in getattr(node, "handlers", []):
                yield from _in_scope(handler.body)


def _defined(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    """Return what statements of a module or class define or import; the first counts."""
    found: dict[str, ast.AST] = {}
    for node in _in_scope(body):
        names: Iterable[str] = ()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = {part.id for part in _targets(node) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.asname or alias.name for alias in node.names]
        for name in names:
            found.setdefault(name, node)
    return found


@functools.cache
def _definitions(file: Path) -> dict[str, ast.AST]:
    return _defined(_parsed(file).body)


@functools.cache
def _members(owner: ast.ClassDef) -> dict[str, ast.AST]:
    """Return the attributes of a class: what its body defines, and what its methods set."""
    found = _defined(owner.body)
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for part in _targets(node):
                if isinstance(part, ast.Attribute):  # a local variable of a method is none
                    found.setdefault(part.attr, node)
    return found


def _classes_of(variable: ast.AST) -> list[ast.expr]:
    """Return what a variable is an object of, as its annotation or its value says."""
    if isinstance(variable, ast.AnnAssign):
        return [variable.annotation]
    value = getattr(variable, "value", None)
    return [value.func] if isinstance(value, ast.Call) else []


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _targets(node: ast.Assign | ast.AnnAssign) -> Iterator[ast.AST]:
    """Yield the parts of what an assignment sets."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from ast.walk(target)


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
