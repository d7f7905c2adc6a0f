"""Write `configs/`: the paper's setting, one complete file for each method and machine.

    python examples/multihop_qa/make_configs.py            write the files
    python examples/multihop_qa/make_configs.py --check    exit 1 when one is stale

Reads nothing but the tables below: METHODS (what Agent-R1, arXiv:2511.14460, trains with), MODELS
and MACHINES. The files differ in few lines, and a newcomer still needs only one of them.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent / "configs"

MAX_ROLLOUTS_PER_SERVER = 256
GB = 1e9


@dataclass(frozen=True)
class Method:
    """One algorithm of the paper."""

    name: str
    """Its preset, `learner.algorithm`."""
    title: str
    group_size: int
    """Trajectories per prompt."""
    keys: str
    """Its lines of `[learner]`."""
    has_critic: bool = False


KL_IN_REWARD = """\
kl = "reward"
kl_coef = 1e-3
kl_estimator = "k1"                # the default of their framework
"""
KL_IN_LOSS = """\
kl = "loss"
kl_coef = 1e-3
kl_estimator = "k3"                # called low_var_kl there
"""
NO_SCRIPT = """\
# The paper's code has no script for this method: samples per prompt and KL are GRPO's.
"""

METHODS = (
    Method(
        "ppo",
        "PPO",
        1,
        """\
gamma = 1.0
lam = 1.0
critic_lr = 1e-5
critic_warmup_steps = 5
"""
        + KL_IN_REWARD,
        has_critic=True,
    ),
    Method("grpo", "GRPO", 5, KL_IN_LOSS),
    Method("reinforce_pp", "REINFORCE++", 1, "gamma = 1.0\n" + KL_IN_REWARD),
    Method("reinforce_pp_baseline", "REINFORCE++Baseline", 5, NO_SCRIPT + KL_IN_LOSS),
    Method("rloo", "RLOO", 5, NO_SCRIPT + KL_IN_LOSS),
)


@dataclass(frozen=True)
class Model:
    """A Qwen2.5-Instruct model; sizes from its config.json, for the memory that comments state."""

    size: str
    weights: float
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_bytes: int
    """Bytes of KV cache per token: layers x 2 x KV heads x head size x 2."""
    licence: str = "Apache-2.0"

    @property
    def name(self) -> str:
        """The model's name."""
        return f"Qwen2.5-{self.size.upper()}-Instruct"


MODELS = {
    "0.5b": Model("0.5b", 0.494e9, 24, 896, 4864, 151_936, 12_288),
    "1.5b": Model("1.5b", 1.544e9, 28, 1536, 8960, 151_936, 28_672),
    "3b": Model("3b", 3.086e9, 36, 2048, 11_008, 151_936, 36_864, "research licence"),
    "7b": Model("7b", 7.616e9, 28, 3584, 18_944, 152_064, 57_344),
}


@dataclass(frozen=True)
class Machine:
    """One machine with the model that it trains."""

    model: str
    gpus: int
    gpu_gb: int
    max_context: int = 16_384
    shared_utilization: float = 0.0
    """One GPU: the engine's share of it."""
    max_concurrent: int = MAX_ROLLOUTS_PER_SERVER
    chunk: int = 1024
    """`learner.logprob_chunk_tokens`."""

    def rollout_gpus(self, method: Method) -> int:
        """GPUs of the rollout servers, one each; a quarter suffices one sample per prompt."""
        if self.gpus == 1:
            return 1
        return self.gpus // (2 if method.group_size > 1 else 4)

    def ranks(self, method: Method) -> int:
        """GPUs of the learner."""
        return 1 if self.gpus == 1 else self.gpus - self.rollout_gpus(method)

    def offload(self, method: Method) -> bool:
        """One GPU does not hold the optimizer state of a policy, of a critic and an engine."""
        return self.gpus == 1 and method.has_critic

    def zero_stage(self, method: Method) -> int:
        """ZeRO stage: 3 shards over ranks; 2 moves gradients to the CPU as they come."""
        if self.gpus > 1:
            return 3
        return 2 if self.offload(method) else 1

    def file_name(self, method: Method) -> str:
        """Name of the file in `configs/`."""
        memory = f"_{self.gpu_gb}gb" if self.gpus == 1 else ""
        return f"{method.name}_{self.model}_{self.gpus}gpu{memory}.toml"


ALL_METHODS = tuple(method.name for method in METHODS)
MACHINES = (
    (Machine("3b", 4, 80), ALL_METHODS),
    (Machine("3b", 8, 80), ALL_METHODS),
    (Machine("1.5b", 4, 80), ALL_METHODS),
    (Machine("7b", 8, 80), ALL_METHODS),
    (Machine("0.5b", 1, 24, 8192, 0.25, 64, chunk=512), ("ppo", "grpo")),
    (Machine("1.5b", 1, 80, 16_384, 0.35, 128), ("ppo", "grpo")),
)

PROMPT = r'''system_prompt = """
You answer questions by searching an encyclopedia. In every turn think first, between <think> and \
</think>. Then either call the search tool once, or, when you know enough, give the final answer \
between <answer> and </answer>: as few words as possible, without explanation. Search for one fact \
at a time, and use what you found in the next search."""
'''

FILE = """\
# {title} on real multi-hop questions, the setting of Agent-R1 (arXiv:2511.14460):
# {model} ({licence}) on {gpus} of {gpu_gb} GB.
#
# Written by make_configs.py; change the tables there. "Differs" marks what is not the paper's.
# Checked to load and to resolve; not run on GPUs, so sizes below are worked out, not measured.
# docs/paper-setting.md says how to make the data, start the services and evaluate.

[run]
id = "multihop-{id}"
seed = 0

[model]
path = "Qwen/{model}"{model_comment}
dtype = "bfloat16"
max_context = {max_context}{context_comment}

[data]
# 25,600 questions each: 51,200 in all, 400 steps of 128, one epoch.
train = ["../data/hotpotqa_train.jsonl", "../data/2wikimultihopqa_train.jsonl"]

[env]
max_turns = 5
max_tokens_per_turn = 1024
max_tool_response_chars = 2048
max_calls_per_turn = 1
{prompt}
[tools.search]
# Differs: BM25 over the corpus below; the paper searches 36 million passages with dense vectors.
type = "search"
corpus = "../data/corpus.jsonl"
top_k = 5

[reward]
rule = "paper"                     # exact match if the format is right, else format - 1

[redis]
maxmemory_mb = 2048

[rollout]
{placement_comment}{rollout_memory}max_concurrent = {max_concurrent}
gpu_memory_utilization = {utilization}
tensor_parallel_size = 1           # differs: 2 there

[placement]
rollout_replicas = {replicas}

[learner]
epochs = 1
groups_per_batch = 128
group_size = {group_size}
optimizer_steps_per_batch = 2      # mini-batches of 64 prompts
temperature = 1.0
lr = 1e-6
algorithm = "{method}"
clip_low = 0.2
clip_high = 0.2
dual_clip = 3.0
importance_cap = "none"            # no such weights there; "auto" corrects for the engine's numbers
{method_keys}max_staleness = 0
{learner_memory}ranks = {ranks}
zero_stage = {zero_stage}
{offload}activation_checkpointing = true
max_tokens_per_microbatch = {max_context}
logprob_chunk_tokens = {chunk}
# A step may take longer than the defaults allow before its last trajectory has come back.
sample_timeout_s = 1800.0
stall_timeout_s = 3600.0
checkpoint_every = 50              # differs: the paper's scripts keep none
keep_last = 2

[evaluation]
# All questions before and after training; 128 of each set every 10 steps, greedy, as in the paper.
every = 10
max_questions_during = 128
temperature = 0.0
timeout_s = 14400.0

[evaluation.sets]
hotpotqa = "../data/hotpotqa_eval.jsonl"
2wikimultihopqa = "../data/2wikimultihopqa_eval.jsonl"
musique = "../data/musique_eval.jsonl"
"""

OWN_GPUS = """\
# Differs: rollout servers and learner have GPUs of their own, {replicas} and {ranks} of them; there
# both take turns on all. `agent-r1 train` shows every service all GPUs, so start the services one
# by one, each with its CUDA_VISIBLE_DEVICES.
"""
SHARED_GPU = """\
# Differs: learner and engine share one GPU and hold their memory at the same time; there the
# engine gives its memory back while the learner works. Start the rollout server first: an engine
# counts what others take while it measures as its own.
"""


def _gb(count: float) -> str:
    return f"{count / GB:.1f} GB"


def _activation_bytes(model: Model, tokens: int, chunk: int) -> float:
    """Bytes of one micro-batch: layer inputs, one layer recomputed, one chunk of logits."""
    inputs = 2.0 * tokens * model.layers * model.hidden
    layer = 2.0 * tokens * (4 * model.intermediate + 8 * model.hidden)
    # Logits, log-probabilities, probabilities and their gradient; the head's float32 gradient.
    head = 4.0 * model.vocabulary * (4 * chunk + model.hidden)
    return inputs + layer + head


def _rollout_memory(machine: Machine, utilization: float) -> str:
    model = MODELS[machine.model]
    engine = utilization * machine.gpu_gb * GB
    weights = 2 * model.weights
    # Activations and graphs of the engine, roughly.
    cache = engine - weights - (1.5 if machine.gpu_gb < 40 else 4) * GB
    full = int(cache / (model.kv_bytes * machine.max_context))
    return (
        f"# Memory: {utilization} x {machine.gpu_gb} GB = {_gb(engine)}; less {_gb(weights)} of "
        f"weights and what the engine\n# computes in, about {_gb(cache)} of KV cache of "
        f"{model.kv_bytes:,} bytes a token: {full} trajectories\n"
        f"# of {machine.max_context:,} tokens at a time, many more of the usual length.\n"
    )


def _learner_memory(machine: Machine, method: Method, utilization: float) -> str:
    model, ranks, stage = MODELS[machine.model], machine.ranks(method), machine.zero_stage(method)
    offload = machine.offload(method)
    if offload:
        each, parts = 6, "weights 2, gradients 4 at most; the rest is on the CPU"
    elif stage == 3:
        each, parts = 18, "weights 2, gradients 4, master copy 4, Adam 8"
    else:
        each, parts = 20, "weights 2, gradients 2 + 4, master copy 4, Adam 8"
    trained = model.weights * (2 if method.has_critic else 1)
    state = trained * each / ranks
    reference = model.weights * 2 / ranks
    activations = _activation_bytes(model, machine.max_context, machine.chunk)
    spare = (2 if machine.gpu_gb < 40 else 4) * GB
    total = state + reference + activations + spare
    what = "policy and critic" if method.has_critic else "policy"
    over = f" / {ranks} ranks" if ranks > 1 else ""
    lines = [
        f"# Memory of one GPU: {what}, {trained / 1e9:.2f}e9 weights x {each} bytes{over} = "
        f"{_gb(state)}",
        f"# ({parts}); reference {_gb(reference)};",
        f"# activations and logits of {machine.max_context:,} tokens {_gb(activations)}; buffers "
        f"and CUDA {_gb(spare)}:",
        f"# {_gb(total)} of {machine.gpu_gb}.",
    ]
    if machine.gpus == 1:
        engine = utilization * machine.gpu_gb * GB
        lines[-1] = (
            f"# {_gb(total)}, and {_gb(engine)} of the engine: {_gb(total + engine)} of "
            f"{machine.gpu_gb}."
        )
    if offload:
        lines.append(f"# On the CPU: 16 bytes a weight, {_gb(16 * trained)}.")
    return "\n".join(lines) + "\n"


def render(method: Method, machine: Machine) -> str:
    """Return one configuration file."""
    model = MODELS[machine.model]
    one = machine.gpus == 1
    replicas, ranks = machine.rollout_gpus(method), machine.ranks(method)
    utilization = machine.shared_utilization if one else 0.85
    paper_model = machine.model == "3b"
    short = machine.max_context < 16_384
    return FILE.format(
        title=method.title,
        model=model.name,
        licence=model.licence,
        gpus="1 GPU" if one else f"{machine.gpus} GPUs",
        gpu_gb=machine.gpu_gb,
        id=machine.file_name(method).removesuffix(".toml").replace("_", "-"),
        model_comment="  # research use only" if paper_model else "  # differs: 3B there",
        max_context=machine.max_context,
        context_comment=(
            "                 # differs: 16384 there (prompt 8192 + response 8192)"
            if short
            else "                # prompt 8192 + response 8192"
        ),
        prompt=PROMPT,
        placement_comment=(SHARED_GPU if one else OWN_GPUS).format(replicas=replicas, ranks=ranks),
        rollout_memory=_rollout_memory(machine, utilization),
        max_concurrent=machine.max_concurrent,
        utilization=utilization,
        replicas=replicas,
        group_size=method.group_size,
        method=method.name,
        method_keys=method.keys,
        learner_memory=_learner_memory(machine, method, utilization),
        ranks=ranks,
        zero_stage=machine.zero_stage(method),
        offload='offload = "optimizer"\n' if machine.offload(method) else "",
        chunk=machine.chunk,
    )


def all_files() -> dict[str, str]:
    """Return the text of every file of `configs/` by its name."""
    methods = {method.name: method for method in METHODS}
    return {
        machine.file_name(methods[name]): render(methods[name], machine)
        for machine, names in MACHINES
        for name in names
    }


def stale_files(folder: Path) -> list[str]:
    """Return the names of files that are missing, differ, or that no table asks for."""
    wanted = all_files()
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.toml")}
    return sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    )


def main(argv: list[str] | None = None) -> int:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description="Write configs/ from the tables of this script.")
    parser.add_argument("--check", action="store_true", help="only say which files are stale")
    parser.add_argument("--out", type=Path, default=CONFIGS, help="folder (configs/)")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.out
    stale = stale_files(folder)
    if arguments.check:
        for name in stale:
            print(f"{folder / name} is stale; run make_configs.py", file=sys.stderr)
        return 1 if stale else 0
    folder.mkdir(parents=True, exist_ok=True)
    wanted = all_files()
    for name in stale:
        if name in wanted:
            (folder / name).write_text(wanted[name], encoding="utf-8")
        else:
            print(f"{folder / name} is in no table; left as it is", file=sys.stderr)
    print(f"{len(wanted)} files in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
