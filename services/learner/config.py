"""The tables of `run.toml` the learner reads: `[data]`, `[learner]`, `[engine]`, `[evaluation]`,
`[sft]`, `[train_reward]`.

`agent_r1.config.run` composes them with the tables of the other services; the learner gets them as
arguments. Imports no torch, so that a configuration is checked without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, model_validator

from agent_r1.learner.algorithms import ADVANTAGES
from agent_r1.learner.algorithms.advantages import AdvantageEstimator
from agent_r1.learner.objective import (
    RATIO_LOSSES,
    ObjectiveConfig,
    PositiveFloat,
    PositiveInt,
    Share,
)
from agent_r1.runtime.config import ListenConfig, StrictConfig
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.text.verdicts import QUESTION
from agent_r1_proto.tasks import PositiveTemperature, Temperature
from agent_r1_proto.weights import Backend, TransportName

GRADIENT_BUCKET = 500_000_000
"""Most gradients that ranks exchange at a time: DeepSpeed's own `reduce_bucket_size`."""
Layout = Literal["shared", "padded", "packed"]
LoggerName = Literal["tensorboard", "wandb", "mlflow"]

IMPORTANCE_CAP = 2.0
"""Largest importance weight of `importance_cap = "auto"`, as in F. Yao et al., 2025."""


STORE_SCHEMES = ("s3", "gs", "az", "file")
"""Schemes of URLs of object stores."""


def store_url_problem(url: str) -> str | None:
    """Say what is wrong with the URL of an object store; None where nothing is."""
    parts = urlsplit(url)
    if parts.username is not None or parts.query:
        return (
            "must hold no credentials and no options: set the variables that docs/checkpoints.md "
            "lists, and remove what stands before @ or after ?"
        )
    if parts.scheme not in STORE_SCHEMES:
        return (
            f"({url!r}) must start with one of {', '.join(f'{name}://' for name in STORE_SCHEMES)}"
            "; a folder that all machines see is file:///FOLDER"
        )
    if parts.scheme == "file":
        return f"({url!r}) must name a folder: file:///FOLDER" if parts.netloc else None
    return None if parts.netloc else f"({url!r}) names no bucket: {parts.scheme}://BUCKET/PATH"


class DataConfig(StrictConfig):
    """`[data]`: the prompts that are trained on."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """Files of tasks, or data sets on the hub, read in this order: each a text or a table."""
    shuffle: bool = True
    """Whether each epoch goes through the prompts in a new order."""
    seed: int | None = None
    """Seed of that order; None is `run.seed`."""
    max_prompt_tokens: PositiveInt | None = None
    """Most tokens of a prompt, as the chat template renders it with the system message and without
    the tools' descriptions. None: prompts are not measured, and one that fills `model.max_context`
    ends its trajectories as TRUNCATED."""
    over_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of a longer prompt. `refuse`: nothing starts, and the message names file and line.
    `drop`: it is left out, and the learner's log has the number of those."""


class EvaluationConfig(StrictConfig):
    """`[evaluation]`: greedy or sampled answers to held-out questions, on the same servers."""

    sets: dict[str, DataSource] = {}
    """Tasks per set name: a file, or a data set on the hub, as a text or a table."""
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every this many learner steps; 0 is never during training."""
    before: bool = True
    """Evaluate the policy that training starts from."""
    after: bool = True
    """Evaluate the last policy."""
    temperature: Temperature = 0.0
    """Sampling temperature of evaluation; 0.0 is greedy."""
    max_questions: PositiveInt | None = None
    """Most questions asked of each set; None asks all of them."""
    max_questions_during: PositiveInt | None = None
    """Most questions of each set asked by an evaluation during training; None: max_questions."""
    timeout_s: PositiveFloat = 1800.0
    """Longest one evaluation may take, in seconds."""
    score: str = "reward"
    """Score that `patience` and `learner.keep_best` compare: `reward`, or a component that
    `reward.components` names, also with weight 0.0; its mean over the sets."""
    patience: PositiveInt | None = None
    """Training ends when so many evaluations in a row are no better than the best one before them,
    as happens to a policy that learns to please a reward model; None: it takes all its steps."""

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        for name, source in self.sets.items():
            if not (name.strip() and name.isprintable()):
                raise ValueError(
                    f"evaluation.sets has the name {name!r}; it is part of names of metrics and "
                    "must be printable; use letters, digits and signs"
                )
            if source.weight != 1.0:
                raise ValueError(
                    f"evaluation.sets.{name}.weight ({source.weight:g}) has no meaning: an "
                    "evaluation asks each question once; remove it"
                )
        if self.every and not self.sets:
            raise ValueError(
                f"evaluation.every ({self.every}) needs at least one set; name a file under "
                "evaluation.sets or set every = 0"
            )
        if self.patience is not None and not self.every:
            raise ValueError(
                f"evaluation.patience ({self.patience}) counts evaluations during training; set "
                "evaluation.every to the steps between two of them"
            )
        return self


class EngineConfig(StrictConfig):
    """`[engine]`: the training engine, in reinforcement learning and supervised training."""

    lr: PositiveFloat = 1e-6
    """Learning rate after warm-up."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Schedule of the learning rate after the warm-up; cosine and linear fall to `min_lr_ratio` at
    the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: Share = 0.0
    """Learning rate at the last step, as a share of `lr`."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    """AdamW's decay rates of the two moments."""
    adam_eps: PositiveFloat = 1e-8
    """Constant that is added to AdamW's denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay, applied to matrices only (no norms, no biases)."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the gradients (over all ranks); larger ones are scaled down to it."""

    max_tokens_per_microbatch: PositiveInt = 16384
    """Most tokens that one forward pass computes on one rank, padding included. The first key to
    lower when memory runs out. A longer trajectory gets a pass of its own."""
    max_padding_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Largest share of a micro-batch that may be padding, where neither `share_prefixes` nor
    `packing` is on; a trajectory that would make more goes elsewhere."""
    share_prefixes: bool | None = None
    """Compute a prefix shared by trajectories of a micro-batch only once. Needs `model.attention =
    "sdpa"` and layers that look back at all tokens, and on GPUs, where torch's FlexAttention does
    it, heads of size 16 or more; not done with `packing`. None: yes on CPUs if these conditions
    hold, no on GPUs, where it has not been measured."""
    packing: bool = False
    """Put the trajectories of a micro-batch end to end in one row instead of padding them. With
    `model.attention = "sdpa"` under the conditions of `share_prefixes`; "flash_attention_2" does it
    too, and with "eager", attention costs the row's square."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time, per rank."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO: 1 shards optimizer state over the ranks, 2 gradients too, 3 weights too.
    bfloat16 runs 0 as 1, for float32 gradients and master weights."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Keep optimizer state (and, with ZeRO-3, weights) in CPU memory; needs zero_stage >= 1."""
    ranks: PositiveInt = 1
    """Learner processes: one a GPU, or any number on CPU. All are on this machine, unless torchrun,
    or another launcher that sets its variables, starts them."""
    rank_interface: str | None = None
    """Network interface, such as eth0, on which the ranks listen for each other; None: the one that
    reaches MASTER_ADDR, which is the loopback interface where no launcher sets that variable."""
    rank_join_timeout_s: PositiveFloat = 300.0
    """Longest to wait at start until all ranks have met, in seconds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs when there are any."""
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of its GPU's memory that a rank takes, where a rollout server has the GPU too;
    None: no limit, but `agent-r1 train` gives what the servers leave. Set it where you start the
    services yourself."""
    torch_threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of each rank; 0 leaves torch's choice."""
    collective_timeout_s: PositiveFloat = 1800.0
    """A rank that waits longer than this for another during a step ends the run, in seconds."""

    @property
    def layout(self) -> Layout:
        """Layout of trajectories in a micro-batch."""
        if self.packing:
            return "packed"
        return "shared" if self.share_prefixes else "padded"

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload != "none" and self.zero_stage == 0:
            raise ValueError(
                f'offload ("{self.offload}") needs zero_stage >= 1 and zero_stage is 0; '
                'set zero_stage = 1 or offload = "none"'
            )
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(
                f'offload ("all") moves weights, which needs zero_stage = 3 ({self.zero_stage} is '
                'set); raise it or set offload = "optimizer"'
            )
        return self


class LearnerConfig(ObjectiveConfig):
    """`[learner]`: batches, objective, pushes and checkpoints."""

    steps: Annotated[int, Field(ge=0)] | None = None
    """Learner steps (one batch of groups each); 0 only evaluates, and None runs `epochs` through
    the prompts."""
    epochs: PositiveInt = 1
    """Passes through the prompts when `steps` is None."""
    groups_per_batch: PositiveInt = 16
    """Prompts in one learner step."""
    group_size: PositiveInt = 8
    """Trajectories per prompt."""
    optimizer_steps_per_batch: PositiveInt = 1
    """Optimizer steps on one batch, each on an equal share of its trajectories."""
    temperature: PositiveTemperature = 1.0
    """Sampling temperature of training rollouts; log-probabilities are computed at it."""
    max_turns: PositiveInt | None = None
    """Most turns of the model, in training and in the run's evaluations; None leaves
    `env.max_turns`."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Target for the age of the oldest trajectory in a batch, in learner steps; 0 is synchronous
    on-policy training. A trajectory that takes longer is still trained on, never dropped."""
    max_attempts: PositiveInt = 3
    """Attempts at one sample before its failure is final."""
    sample_timeout_s: PositiveFloat = 600.0
    """A sample without a final result for this long is issued again, in seconds."""
    stall_timeout_s: PositiveFloat = 1800.0
    """The run stops when no group completes for this long, in seconds."""
    max_failed_share: Share = 0.5
    """The run stops when more than this share of the last two batches failed, or when each sample
    of a batch did."""
    max_lost_share: Share = 0.05
    """A run that lost more than this share of its samples, or of the questions of an evaluation
    set, ends with the status "finished_with_losses" and exit status 3."""

    transport: TransportName = "file"
    """Transport of the weights to the rollout servers. `file`: through `weights_dir`, a folder that
    all see under the same path. `http`: servers pull them from the learner, and from each other.
    `collective`: the learner sends them from its memory to all servers at once, over links of at
    least 10 Mbit/s."""
    server: ListenConfig = ListenConfig()
    """Address at which the learner listens: for `GET /metrics`, for services that join the run, and
    with transport = "http" for pulls of weights. With "collective", its address is also that of the
    store in which servers meet."""
    collective_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on the address of `server` at which servers meet the learner, with transport =
    "collective"; 0 takes a free one. The transfer itself takes free ports, and none of them asks
    who comes."""
    collective_backend: Backend = "gloo"
    """Library that sends weights with transport = "collective". gloo sends from host memory to host
    memory. nccl sends from GPU to GPU, where the learner and every server have their own, and takes
    about 0.5 GB of each server's first. ipc is for a server on the learner's GPU, which maps a
    copy of the weights that the learner keeps there; two copies lie there for a moment. nccl has
    not been run."""
    push: Literal["dense", "delta"] = "dense"
    """Form of what servers pull with transport = "http". `delta`: those that hold the version
    before pull what has changed since, without loss; in bfloat16 that is a small part."""
    dense_every: PositiveInt = 20
    """Number of versions of which, with push = "delta", one has no delta and is pulled whole."""
    weights_dir: Path | None = None
    """Folder of the weight versions; None is `{run folder}/weights`."""
    keep_versions: Annotated[int, Field(ge=2)] = 2
    """Published weight versions kept there."""
    push_timeout_s: PositiveFloat = 120.0
    """Longest a rollout server may take to load a version, in seconds; and a second more for every
    50 MB."""
    push_connect_timeout_s: PositiveFloat = 5.0
    """Longest to wait for a connection to a rollout server, in seconds."""
    first_server_timeout_s: PositiveFloat = 600.0
    """Longest to wait at start for a rollout server to announce itself, in seconds."""
    canary_tokens: Annotated[int, Field(ge=0)] = 32
    """Sampled tokens compared after a push: those of `canary_trajectories` at which the policy's
    entropy is highest. 0 is no canary."""
    canary_trajectories: PositiveInt = 2
    """Trajectories of the batch that they are chosen from, those whose tokens were the least
    expected. The learner and a server compute each of them once more."""
    canary_every: PositiveInt = 1
    """Compare every this many pushes."""
    canary_action: Literal["fail", "warn"] = "fail"
    """Reaction to a comparison outside the bounds."""
    canary_mean_dlogp: PositiveFloat | None = None
    """Mean |difference| of log-probabilities allowed; None is 2e-5 in float32, 0.05 in bfloat16."""
    canary_fail_factor: PositiveFloat = 3.0
    """Mean |difference| allowed in bfloat16, as a multiple of that at version 0, if it is more."""
    canary_warn_factor: PositiveFloat = 2.0
    """Mean |difference| that is warned of in bfloat16, as a multiple of that at version 0."""

    checkpoint_url: str | None = None
    """Object store that gets a copy of checkpoints and ledger, below `{checkpoint_url}/{run.id}`,
    so that any machine can resume the run: s3://BUCKET/PATH, gs://, az:// or file://. Credentials
    are in the environment. None keeps them in the run folder alone."""
    checkpoint_retry_s: PositiveFloat = 300.0
    """Longest that a request to `checkpoint_url` is repeated while the store does not answer, in
    seconds; then the run ends with the reason, and can be resumed."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoint every this many learner steps; 0 is only at the end and on interruption."""
    keep_last: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """Checkpoints kept in addition: those with the best evaluations."""
    loggers: list[LoggerName] = ["tensorboard"]
    """Further places for the numbers of `metrics.jsonl`: `tensorboard` (in the run folder),
    `wandb`, `mlflow`. See docs/observability.md."""
    trajectories_per_step: Annotated[int, Field(ge=0)] | Literal["all"] = 8
    """Trajectories of each batch, of its failures and of each evaluation set that are stored in
    `trajectories/`, with every token: so many, or `all`."""
    trajectories_max_gib: PositiveFloat = 10.0
    """Largest size of `trajectories/`, in GiB. Where it is reached, the oldest steps and
    evaluations are removed; the newest step stays."""

    @property
    def stored_limit(self) -> int | None:
        """Return `trajectories_per_step` as a number; None: all."""
        return None if self.trajectories_per_step == "all" else self.trajectories_per_step

    @property
    def needs_learner_logprobs(self) -> bool:
        """Return whether the ratio starts at log-probabilities that the learner computes first.

        Else it starts at the rollout's, and corrects for older samples by itself.
        """
        return (
            self.optimizer_steps_per_batch > 1
            or not self.loss_mask
            or self.kl == "reward"
            or self.importance_low > 0
            or self.importance_high is not None
            or isinstance(self.importance_cap, float)
            or (self.importance_cap == "auto" and self._loss_may_lack_a_ratio)
        )

    @property
    def _loss_may_lack_a_ratio(self) -> bool:
        return self.max_staleness > 0 and self.policy_loss not in RATIO_LOSSES

    @property
    def largest_weight(self) -> float | None:
        """The cap of importance weights; None where there are none."""
        if isinstance(self.importance_cap, float):
            return self.importance_cap
        weighs = self.importance_cap == "auto" and self.needs_learner_logprobs
        return IMPORTANCE_CAP if weighs else None

    @property
    def slots_per_group(self) -> int:
        """Trajectories asked for per prompt, a greedy answer included."""
        return self.group_size + int(self.has_greedy_baseline)

    def num_steps(self, num_prompts: int) -> int:
        """Return the learner steps of a run with so many prompts."""
        if self.steps is not None:
            return self.steps
        return max(1, self.epochs * num_prompts // self.groups_per_batch)

    @model_validator(mode="after")
    def _check_checkpoint_url(self) -> Self:
        if self.checkpoint_url is not None:
            problem = store_url_problem(self.checkpoint_url)
            if problem is not None:
                raise ValueError(f"learner.checkpoint_url {problem}")
        return self

    def check_group_size(self, kind: type[AdvantageEstimator]) -> None:
        """Refuse groups of one where an estimator compares the trajectories of a group.

        Raises:
            ValueError: it has nothing to compare.
        """
        if kind.compares_group and self.group_size < 2:
            raise ValueError(
                f"learner.group_size ({self.group_size}) must be >= 2 with advantage = "
                f'"{self.advantage}": a group of one has nothing to be compared with; raise '
                'group_size or set advantage = "reinforce_pp"'
            )

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if self.advantage in ADVANTAGES:
            self.check_group_size(ADVANTAGES[self.advantage])
        if self.drop_equal_groups and self.group_size < 2:
            raise ValueError(
                f"learner.drop_equal_groups = true needs groups of at least 2 (group_size is "
                f"{self.group_size}): the one reward of a group always equals itself; raise "
                "group_size or set drop_equal_groups = false"
            )
        if self.push == "delta" and self.transport != "http":
            raise ValueError(
                f'learner.push ("delta") needs learner.transport = "http" (it is '
                f'"{self.transport}", whose servers read whole files); set it, or push = "dense"'
            )
        batch = self.groups_per_batch * self.group_size
        if self.optimizer_steps_per_batch > batch:
            raise ValueError(
                f"learner.optimizer_steps_per_batch ({self.optimizer_steps_per_batch}) must be <= "
                f"the {batch} trajectories of a batch (groups_per_batch x group_size); lower it"
            )
        return self


class SupervisedEngineConfig(EngineConfig):
    """`[sft.engine]` and `[train_reward.engine]`: what differs from `[engine]`."""

    lr: PositiveFloat = 1e-5
    """Learning rate after warm-up."""


class SupervisedConfig(StrictConfig):
    """Settings of supervised training on dialogues, whatever it learns of them."""

    engine: SupervisedEngineConfig = SupervisedEngineConfig()
    """Keys of `[engine]` that have another value here. A key that is set in neither table has its
    default, which for `lr` is another one."""
    output: Path
    """Hugging Face model directory to write."""
    work_dir: Path | None = None
    """Log and resume state; None is `{output}.sft` or `{output}.train_reward`. The same command
    continues from state there."""
    epochs: PositiveInt = 1
    """Passes through the data; `steps` and `max_tokens` may end training earlier."""
    steps: PositiveInt | None = None
    """Most optimizer steps."""
    max_tokens: PositiveInt | None = None
    """Most tokens trained through, prompt and tool text included."""
    batch_sequences: PositiveInt | None = 32
    """Dialogues in one optimizer step; None when `batch_tokens` rules."""
    batch_tokens: PositiveInt | None = None
    """Most tokens of one optimizer step, instead of `batch_sequences`."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Given to every rendering of the chat template; as `env.chat_template_kwargs` in training."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Write resume state every this many optimizer steps; 0 is never."""
    log_every: PositiveInt = 10
    """Optimizer steps between log lines."""
    seed: int | None = None
    """Orders the data; None is `run.seed`."""

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        if (self.batch_sequences is None) == (self.batch_tokens is None):
            raise ValueError(
                f"batch_sequences ({self.batch_sequences}) and batch_tokens "
                f"({self.batch_tokens}) cannot be combined; set one of them and leave the other "
                "unset"
            )
        return self


class SftConfig(SupervisedConfig):
    """`[sft]`: the supervised warm start, `agent-r1 sft CONFIG`."""

    data: Annotated[list[Path], Field(min_length=1)]
    """JSON-lines files of dialogues: {"messages": [...], "tools": [...] (optional)}."""
    other_token_weight: Share = 0.0
    """Loss weight of prompt and tool tokens; assistant tokens weigh 1."""


class TrainRewardConfig(SupervisedConfig):
    """`[train_reward]`: a reward model from stored trajectories, `agent-r1 train-reward CONFIG`."""

    trajectories: Annotated[list[Path], Field(min_length=1)]
    """Run folders, files of their `trajectories`, or answers of `agent-r1 evaluate` with
    `--decode-continuations`, which say what turns are worth."""
    label: str = "exact_match"
    """The reward component that the model learns, from 0 to 1; "total" is the whole reward."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the tasks that are not trained on; the report is about those, unless
    `test_trajectories` names others."""
    test_trajectories: list[Path] = []
    """Run folders, or files of their `trajectories`, that the report is about in place of
    `held_out`, such as those of questions about other entities. None of their tasks may be among
    those to train on."""
    turns: Literal["all", "last"] = "all"
    """"all" asks for the verdict after every turn, which gives each turn a value; "last" after the
    last one only."""
    ranking: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of a loss that ranks the candidates of one state by their mean rewards, beside the
    likelihood of their verdicts; for answers with continuations."""
    question: str = QUESTION
    """Question to the model after the dialogue; its answer is yes or no."""
    thoughts: bool = True
    """Whether the model reads what the agent thinks (`<think>`). Without, it judges by calls,
    results and the answer, and no claim in a thought persuades it."""
