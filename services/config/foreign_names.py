"""Names that TRL, verl and OpenRLHF give to what a configuration says, and ours for the same.

sources.py asks when it meets a key that it does not know, so that the message names ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BATCH = "learner.groups_per_batch (prompts in one step)"
_GROUP = "learner.group_size"
_MEMORY = "learner.max_tokens_per_microbatch (a limit in tokens)"
_OPTIMIZER_STEPS = "learner.optimizer_steps_per_batch (a number of steps)"
_ANSWER_TOKENS = "env.max_tokens_per_turn"
_PROMPT_TOKENS = "data.max_prompt_tokens"
_KL = "learner.kl_coef, with learner.kl saying where the KL goes"
_REWARDS = "reward.components, by name with their weights"
_TRAIN = "data.train"
_CHECKPOINT = "learner.checkpoint_every"
_EVALUATE = "evaluation.every"
_FOLDER = "run.dir"
_LOGGERS = "learner.loggers"

_TRL = {
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attention",
    "bf16": 'model.dtype = "bfloat16"',
    "torch_dtype": "model.dtype",
    "dataset_name": _TRAIN,
    "num_generations": _GROUP,
    "per_device_train_batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "generation_batch_size": _BATCH,
    "gradient_accumulation_steps": _MEMORY,
    "num_iterations": _OPTIMIZER_STEPS,
    "steps_per_generation": _OPTIMIZER_STEPS,
    "max_prompt_length": _PROMPT_TOKENS,
    "max_completion_length": _ANSWER_TOKENS,
    "max_seq_length": "model.max_context",
    "max_length": "model.max_context",
    "max_steps": "learner.steps",
    "num_train_epochs": "learner.epochs",
    "learning_rate": "learner.lr",
    "lr_scheduler_type": "learner.lr_schedule",
    "adam_epsilon": "learner.adam_eps",
    "gradient_checkpointing": "learner.activation_checkpointing",
    "beta": _KL,
    "kl_coef": _KL,
    "epsilon": "learner.clip_low",
    "epsilon_high": "learner.clip_high",
    "delta": "learner.dual_clip",
    "scale_rewards": "learner.normalize_std",
    "loss_type": "learner.aggregation",
    "mask_truncated_completions": "learner.drop_overlong",
    "reward_funcs": _REWARDS,
    "reward_weights": _REWARDS,
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_max_model_length": "model.max_context",
    "save_steps": _CHECKPOINT,
    "save_total_limit": "learner.keep_last",
    "eval_steps": _EVALUATE,
    "output_dir": _FOLDER,
    "run_name": "run.id",
    "report_to": _LOGGERS,
}
_VERL = {
    "data.train_files": _TRAIN,
    "data.val_files": "evaluation.sets",
    "data.train_batch_size": _BATCH,
    "data.max_response_length": _ANSWER_TOKENS,
    "data.filter_overlong_prompts": "data.over_long",
    "data.train_max_samples": "max_items of an entry of data.train",
    "data.prompt_key": "columns.prompt of an entry of data.train",
    "rollout.n": _GROUP,
    "rollout.temperature": "learner.temperature",
    "rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "rollout.max_num_batched_tokens": "rollout.max_batched_tokens",
    "rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "multi_turn.max_assistant_turns": "env.max_turns",
    "multi_turn.max_tool_response_length": "env.max_tool_response_chars",
    "multi_turn.tool_config_path": "a table [tools.NAME] for each tool",
    "actor_rollout_ref.model.path": "model.path",
    "model.enable_gradient_checkpointing": "learner.activation_checkpointing",
    "actor.optim.lr": "learner.lr",
    "optim.lr_warmup_steps": "learner.warmup_steps",
    "optim.weight_decay": "learner.weight_decay",
    "actor.grad_clip": "learner.max_grad_norm",
    "actor.ppo_epochs": _OPTIMIZER_STEPS,
    "ppo_mini_batch_size": _OPTIMIZER_STEPS,
    "ppo_micro_batch_size": _MEMORY,
    "ppo_micro_batch_size_per_gpu": _MEMORY,
    "ppo_max_token_len_per_gpu": _MEMORY,
    "log_prob_micro_batch_size_per_gpu": _MEMORY,
    "clip_ratio": "learner.clip_low and learner.clip_high",
    "clip_ratio_low": "learner.clip_low",
    "clip_ratio_high": "learner.clip_high",
    "clip_ratio_c": "learner.dual_clip",
    "entropy_coeff": "learner.entropy_coef",
    "use_kl_loss": 'learner.kl = "loss"',
    "use_kl_in_reward": 'learner.kl = "reward"',
    "kl_loss_coef": _KL,
    "kl_loss_type": "learner.kl_estimator",
    "kl_penalty": "learner.kl_estimator",
    "loss_agg_mode": "learner.aggregation",
    "adv_estimator": "learner.advantage",
    "algorithm.gamma": "learner.gamma",
    "algorithm.lam": "learner.lam",
    "norm_adv_by_std_in_grpo": "learner.normalize_std",
    "critic.optim.lr": "learner.critic_lr",
    "critic.model.path": "learner.critic_path",
    "custom_reward_function.path": _REWARDS,
    "reward_model.reward_manager": _REWARDS,
    "trainer.total_epochs": "learner.epochs",
    "trainer.total_training_steps": "learner.steps",
    "trainer.save_freq": _CHECKPOINT,
    "trainer.test_freq": _EVALUATE,
    "trainer.val_before_train": "evaluation.before",
    "trainer.critic_warmup": "learner.critic_warmup_steps",
    "trainer.logger": _LOGGERS,
    "trainer.project_name": "run.id",
    "trainer.experiment_name": "run.id",
    "trainer.default_local_dir": _FOLDER,
    "trainer.n_gpus_per_node": "learner.ranks and [placement]",
    "trainer.nnodes": "learner.ranks and [placement]",
}
_OPENRLHF = {
    "pretrain": "model.path",
    "prompt_data": _TRAIN,
    "input_key": "columns.prompt of an entry of data.train",
    "label_key": "columns.answers of an entry of data.train",
    "apply_chat_template": "the chat template is always applied; remove it",
    "n_samples_per_prompt": _GROUP,
    "rollout_batch_size": _BATCH,
    "micro_train_batch_size": _MEMORY,
    "micro_rollout_batch_size": "rollout.max_concurrent",
    "prompt_max_len": _PROMPT_TOKENS,
    "generate_max_len": _ANSWER_TOKENS,
    "max_len": "model.max_context",
    "actor_learning_rate": "learner.lr",
    "critic_learning_rate": "learner.critic_lr",
    "critic_pretrain": "learner.critic_path",
    "init_kl_coef": _KL,
    "use_kl_loss": 'learner.kl = "loss"',
    "eps_clip": "learner.clip_low and learner.clip_high",
    "eps_clip_low_high": "learner.clip_low and learner.clip_high",
    "advantage_estimator": "learner.advantage",
    "num_episodes": "learner.epochs",
    "max_epochs": _OPTIMIZER_STEPS,
    "save_path": _FOLDER,
    "ckpt_path": _FOLDER,
    "remote_rm_url": _REWARDS,
    "agent_func_path": 'env.type = "module:Name"',
    "vllm_num_engines": "placement.rollout_replicas",
    "adam_offload": 'learner.offload = "optimizer"',
    "packing_samples": "learner.packing",
    "use_wandb": _LOGGERS,
    "use_tensorboard": _LOGGERS,
}
NAMES: Mapping[str, str] = _TRL | _OPENRLHF | _VERL
"""Our key, or what else to do, by the last parts of their name."""


def our_name(key: Sequence[str]) -> str | None:
    """Return what is called `key` elsewhere: `actor_rollout_ref.rollout.n`, `num_generations`."""
    for start in range(len(key)):
        found = NAMES.get(".".join(key[start:]).lower())
        if found is not None and found != ".".join(key):
            return found
    return None


def our_names(key: Sequence[str], value: Any) -> Iterator[str]:
    """Say of every key in an unknown key or table what it is called here, where it is known."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from our_names((*key, str(name)), inner)
    elif (found := our_name(key)) is not None:
        yield f"{'.'.join(key)} is {found}"
