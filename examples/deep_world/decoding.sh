#!/bin/sh
# Train the agents, critics and reward models of decoding.toml, then compare ways to decode with them.
# From the repository root. What is finished is kept: start it again to continue. The agents learn at a
# tenth of the rate of table.toml, so that after 80 steps they still leave something to choose, and
# their critics and reward models have seen enough.
set -eu
example=examples/deep_world
runs=runs/deep_world/decoding
for seed in 0 1 2; do
    run="$runs/ppo_seed$seed"
    if [ ! -d "$run" ]; then
        .venv/bin/agent-r1 train "$example/run.toml" --run-dir "$run" --set run.seed="$seed" \
            --set learner.algorithm=ppo --set learner.lr=2e-5 --set learner.critic_lr=2e-3 \
            --set learner.trajectories_per_step=64 --set 'diagnose.sets=["development"]' \
            --set 'evaluation.sets={}' \
            --set "evaluation.sets.development=\"$example/data/eval_development.jsonl\""
    elif [ ! -f "$run/summary.json" ]; then
        .venv/bin/agent-r1 train --resume "$run"
    fi
    if [ ! -d "$runs/critic_seed$seed" ]; then
        .venv/bin/agent-r1 export "$run" "$runs/critic_seed$seed" --critic
    fi
    if [ ! -d "$runs/reward_model_seed$seed" ]; then
        .venv/bin/agent-r1 train-reward "$example/reward_model.toml" --set run.seed="$seed" \
            --set train_reward.trajectories="[\"$run\"]" --set train_reward.max_tokens=3000000 \
            --set train_reward.output="$runs/reward_model_seed$seed"
    fi
done
exec .venv/bin/agent-r1 matrix "$example/decoding.toml"
