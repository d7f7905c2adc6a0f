#!/bin/sh
# Train the agents of decoding.toml, learn what their turns are worth, fit how to search, then compare
# ways to decode. From the repository root. What is finished is kept: start it again to continue. The
# agents learn at a tenth of the rate of table.toml, so that after 80 steps they still leave something
# to choose.
set -eu
example=examples/deep_world
runs=runs/deep_world/decoding
only="--set evaluation.sets={} --set" # tables of options are joined, so those of run.toml go first
train_values() { # folder, files of continued turns
    .venv/bin/agent-r1 train-reward "$example/turn_values.toml" --set run.seed="$seed" \
        --set model.path="\"$(ls -d "$run"/checkpoints/step_*/model | tail -1)\"" \
        --set train_reward.trajectories="[$2]" --set train_reward.output="$1"
}
scored_by() { # folder of a model
    echo "--set reward.components.reward_model=0.0 --set reward.model.path=$1 --set reward.model.model=turn-values"
}
for seed in 0 1 2; do
    run="$runs/ppo_seed$seed"
    # --resume of a finished run ends at once. Status 3: it is finished, with losses that were named.
    if [ -f "$run/config.json" ]; then
        .venv/bin/agent-r1 train --resume "$run" || [ $? -eq 3 ]
    else
        .venv/bin/agent-r1 train "$example/run.toml" --run-dir "$run" --set run.seed="$seed" \
            --set learner.algorithm=ppo --set learner.lr=2e-5 --set learner.critic_lr=2e-3 \
            --set learner.trajectories_per_step=64 --set 'diagnose.sets=["development"]' \
            --set 'evaluation.sets={}' \
            --set "evaluation.sets.development=\"$example/data/eval_development.jsonl\"" || [ $? -eq 3 ]
    fi
    # What turns are worth: first in states that the agent comes to, then in states that a search
    # comes to which is led by what was learned from those.
    turns="$runs/turns_seed$seed.jsonl" searched="$runs/searched_seed$seed.jsonl"
    continued="--decode value_guided --decode-lookahead 0 --decode-candidates 8 --decode-continuations 4"
    training="$only diagnose.sets=[\"train\"] --set evaluation.sets.train=$example/data/train.jsonl"
    training="$training --set evaluation.max_questions=1000"
    if [ ! -d "$runs/turn_values_seed$seed" ]; then
        .venv/bin/agent-r1 evaluate "$example/run.toml" --policy "$run" --out "$turns" $continued \
            --decode-beta 0 --set evaluation.temperature=1 $training
        [ -d "$runs/first_values_seed$seed" ] || train_values "$runs/first_values_seed$seed" "\"$turns\""
        .venv/bin/agent-r1 evaluate "$example/run.toml" --policy "$run" --out "$searched" $continued \
            --decode-beta 4 --set evaluation.temperature=1 $training \
            --set run.seed=1 $(scored_by "$runs/first_values_seed$seed")
        train_values "$runs/turn_values_seed$seed" "\"$turns\", \"$searched\""
    fi
    if [ ! -f "$run/decoding.json" ]; then
        .venv/bin/agent-r1 evaluate "$example/run.toml" --policy "$run" --out "$runs/fit_seed$seed.jsonl" \
            --decode value_guided --decode-fit 0.5 1.0 $(scored_by "$runs/turn_values_seed$seed") \
            $only diagnose.sets=[\"development\"] --set evaluation.max_questions=200 \
            --set evaluation.sets.development="$example/data/eval_development.jsonl"
    fi
done
exec .venv/bin/agent-r1 matrix "$example/decoding.toml"
