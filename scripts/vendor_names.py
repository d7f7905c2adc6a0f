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
USED = """
vllm.v1.engine.async_llm AsyncLLM: abort add_lora collective_rpc engine_core errored
    from_vllm_config generate init_weight_transfer_engine is_paused output_handler
    output_processor resume_generation shutdown update_weight_version
vllm.v1.engine.core_client AsyncMPClient: pause_scheduler_async
vllm.v1.engine.core_client MPClient: resources
vllm.v1.engine.core_client BackgroundResources: engine_manager
vllm.v1.engine.utils CoreEngineProcManager: processes
vllm.v1.engine.output_processor OutputProcessor: external_req_ids request_states
vllm.v1.engine.output_processor RequestState: external_req_id weight_version_starts
vllm.v1.engine EngineCoreOutput: prefill_stats new_prompt_logprobs_tensors request_id
    finish_reason new_token_ids new_logprobs events
vllm.v1.engine EngineCoreOutputs: outputs
vllm.outputs CompletionOutput: weight_versions finish_reason logprobs token_ids
vllm.outputs WeightVersionSpan: version start end
vllm.outputs RequestOutput: num_cached_tokens prompt_logprobs outputs
vllm.logprobs FlatLogprobs: start_indices logprobs
vllm.config.vllm VllmConfig: use_v2_model_runner cache_config compilation_config lora_config
    scheduler_config
vllm.config.scheduler SchedulerConfig: async_scheduling max_num_batched_tokens max_num_seqs
vllm.config.cache CacheConfig: block_size
vllm.config.compilation CompilationConfig: cudagraph_mode
vllm.engine.arg_utils AsyncEngineArgs: create_engine_config
vllm.engine.arg_utils EngineArgs: distributed_executor_backend enable_chunked_prefill
    ir_op_priority kv_cache_memory_bytes logprobs_mode scheduler_cls weight_transfer_config
    worker_cls worker_extension_cls block_size enable_lora gpu_memory_utilization
    lora_target_modules max_lora_rank max_loras max_num_batched_tokens
vllm.sampling_params SamplingParams: flat_logprobs skip_clone skip_reading_prefix_cache
    logprobs max_tokens num_logprobs output_kind prompt_logprobs seed stop_token_ids temperature
vllm.sampling_params: _MAX_TEMP
vllm.envs: VLLM_USE_V2_MODEL_RUNNER VLLM_ENGINE_READY_TIMEOUT_S VLLM_WORKER_MULTIPROC_METHOD
    VLLM_CPU_OMP_THREADS_BIND VLLM_DO_NOT_TRACK VLLM_LOGGING_LEVEL VLLM_NO_USAGE_STATS
    VLLM_PLUGINS
vllm.distributed.weight_transfer.base WeightTransferEngine: parse_update_info finish_weight_update
    receive_weights start_weight_update device init_info_cls init_transfer_engine model
    model_config shutdown supports_draft_weight_update update_info_cls update_weights
vllm.distributed.weight_transfer.factory WeightTransferEngineFactory: _registry register_engine
vllm.v1.core.sched.scheduler Scheduler: update_from_output finish_requests requests
vllm.v1.metrics.loggers PrometheusStatLogger: record record_sleep_state record_admission_rejection
    log_engine_initialized
vllm.v1.metrics.stats SchedulerStats: num_running_reqs num_waiting_reqs num_skipped_waiting_reqs
    kv_cache_usage
vllm.v1.metrics.stats IterationStats: num_generation_tokens prompt_token_stats
vllm.v1.metrics.stats PromptTokenStats: computed
vllm.model_executor.models.registry _ModelRegistry: models register_model
vllm.model_executor.models.registry _BaseRegisteredModel: load_model_cls
vllm.lora.punica_wrapper.punica_base PunicaWrapperBase: no_lora
vllm.lora.punica_wrapper.punica_cpu PunicaWrapperCPU: add_lora_linear
vllm.lora.request LoRARequest: load_inplace
vllm.v1.worker.cpu_worker CPUWorker: init_device model_runner vllm_config
vllm.v1.worker.gpu_model_runner GPUModelRunner: input_batch requests sampler
vllm.v1.worker.gpu_input_batch CachedRequestState: output_token_ids sampling_params
vllm.v1.worker.gpu_input_batch InputBatch: num_reqs num_tokens_no_spec req_ids num_prompt_tokens
vllm.v1.sample.metadata SamplingMetadata: all_random logitsprocs temperature top_k top_p
vllm.v1.sample.logits_processor.state LogitsProcessors: argmax_invariant
vllm.v1.sample.sampler Sampler: apply_temperature gather_logprobs logprobs_mode sample
vllm.v1.outputs LogprobsLists: logprob_token_ids logprobs sampled_token_ranks
vllm.v1.outputs ModelRunnerOutput: logprobs req_id_to_index
vllm.v1.core.sched.output SchedulerOutput: num_scheduled_tokens
vllm.v1.request Request: request_id sampling_params
vllm.model_executor.models.qwen2 Qwen2ForCausalLM: load_weights
vllm.ir.ops: rms_norm fused_add_rms_norm
vllm.ir.op IrOp: impls register_impl
deepspeed.accelerator.real_accelerator: "DS_ACCELERATOR"
deepspeed.runtime.engine DeepSpeedEngine: backward step get_global_grad_norm
    set_gradient_accumulation_boundary checkpoint_engine load_checkpoint module optimizer
deepspeed.runtime.zero.stage_1_and_2 DeepSpeedZeroOptimizer: update_lp_params
    _hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state
deepspeed.runtime.zero.stage3 DeepSpeedZeroOptimizer_Stage3: fp32_partitioned_groups_flat
deepspeed.ops: __compatible_ops__
deepspeed.runtime.zero.partition_parameters: Init
deepspeed.runtime.zero.partition_parameters Init: all_gather convert_to_zero_parameters ds_id
    ds_numel ds_shape ds_tensor partition
transformers PreTrainedModel: get_decoder set_attn_implementation gradient_checkpointing_enable
    enable_input_require_grads base_model_prefix config generation_config get_output_embeddings
    save_pretrained tie_weights
transformers PreTrainedTokenizerFast: is_fast
transformers PretrainedConfig: _attn_implementation architectures num_labels get_text_config
    model_type save_pretrained
transformers Qwen2Config: eos_token_id hidden_size max_position_embeddings num_key_value_heads
    num_attention_heads num_hidden_layers tie_word_embeddings
transformers Qwen3Config: head_dim
transformers.core_model_loading: "HF_DEACTIVATE_ASYNC_LOAD"
transformers.modeling_outputs BaseModelOutputWithPast: last_hidden_state
transformers.modeling_outputs CausalLMOutputWithPast: logits
peft.tuners.tuners_utils BaseTunerLayer: enable_adapters
peft.tuners.tuners_utils BaseTuner: merge_and_unload
peft: tuners
peft.tuners: tuners_utils
peft.tuners.tuners_utils: BaseTunerLayer
"""
"""Module, class and attributes: what is used of an object, where no import says so. A class may
give an attribute to objects of others, as DeepSpeed's `Init` does. In quotes: a variable of the
environment that the module reads."""


def listed() -> list[tuple[str, str]]:
    """Return module and dotted path of every name in the list above."""
    entries = (entry.partition(":") for entry in re.split(r"\n(?! )", USED.strip()))
    places = ((*place.split(), names.split()) for place, _, names in entries)
    return [
        (module, ".".join([*owner, name])) for module, *owner, names in places for name in names
    ]


def imported(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import from the packages, and what is used of each."""
    for file in (file for folder in SOURCES for file in sorted((root / folder).rglob("*.py"))):
        names = dict(bound(parsed(file)))
        yield from names.values()
        for node in ast.walk(parsed(file)):
            yield from _uses(node, names)


def bound(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what a module calls each import from the packages, with its module and name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for alias in node.names:
                yield alias.asname or alias.name, (str(node.module), alias.name)


def _uses(node: ast.AST, names: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield what an attribute, or the keywords of a call, use of an import or of `deepspeed.`."""
    if isinstance(node, ast.Call):
        for module, path in _uses_or_is(node.func, names):
            yield from ((module, f"{path}({name})") for name in keywords_of(node))
    elif isinstance(node, ast.Attribute):
        path = ast.unparse(node)
        first, _, rest = path.partition(".")
        if first in MODULES and all(name.isidentifier() for name in path.split(".")):
            yield first, rest
        elif isinstance(node.value, ast.Name) and first in names:
            module, name = names[first]
            yield module, f"{name}.{rest}"


def keywords_of(call: ast.Call) -> Iterator[str]:
    """Yield the names of the keywords in a call."""
    yield from (keyword.arg for keyword in call.keywords if keyword.arg is not None)


def _uses_or_is(node: ast.AST, names: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Name) and node.id in names:
        yield names[node.id]
    yield from _uses(node, names)


def all_names() -> list[tuple[str, str]]:
    """Return module and dotted path of every name, each once."""
    return sorted({*imported(), *listed()})


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
    return _defined(parsed(file).body)


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
def parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
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
