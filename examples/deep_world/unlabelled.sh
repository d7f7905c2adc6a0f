#!/bin/sh
# Train on questions whose answers are hidden, with a reward model that other questions have taught,
# and compare with training on the answers. From the repository root. What is finished is kept: start
# it again to continue.
set -eu
example=examples/deep_world
runs=runs/deep_world

train() { # train NAME SEED [OPTION]...: on the questions that have answers; looks at no reported set
    run=$runs/$1 seed=$2
    shift 2
    if [ ! -d "$run" ]; then
        .venv/bin/agent-r1 train "$example/run.toml" --run-dir "$run" --set "run.seed=$seed" \
            --set learner.trajectories_per_step=64 --set 'diagnose.sets=["development"]' \
            --set 'evaluation.sets={}' \
            --set "evaluation.sets.development=\"$example/data/eval_development.jsonl\"" "$@"
    elif [ ! -f "$run/summary.json" ]; then
        .venv/bin/agent-r1 train --resume "$run"
    fi
}

teach() { # teach NAME RUNS [OPTION]...: a reward model; README.md says how its settings were chosen
    model=$runs/$1 taught_by=$2
    shift 2
    if [ ! -d "$model" ]; then
        .venv/bin/agent-r1 train-reward "$example/reward_model.toml" \
            --set "train_reward.trajectories=[$taught_by]" \
            --set 'train_reward.test_trajectories=["runs/table/unlabelled_true/runs/true_labels_seed0"]' \
            --set train_reward.turns=last --set train_reward.ranks=2 \
            --set train_reward.lr_schedule=linear --set train_reward.min_lr_ratio=0.1 \
            --set "train_reward.output=$model" "$@"
    fi
}

labelled=
for seed in 100 101 102 103; do
    train "labelled_seed$seed" "$seed"
    labelled="$labelled${labelled:+, }\"$run\""
done
.venv/bin/agent-r1 table "$example/unlabelled_true.toml"
teach reward_model "$labelled" --set train_reward.epochs=2
.venv/bin/agent-r1 table "$example/unlabelled_first.toml"

# A policy that learns to please the first model shows it its mistakes.
train pleasing_seed104 104 --set learner.steps=120 \
    --set 'reward.components={reward_model = 1.0, "catalogue:right_within_budget" = 0.0, exact_match = 0.0}' \
    --set "reward.model.path=$runs/reward_model" --set reward.model.model=verifier \
    --set reward.model.max_concurrent=64
teach reward_model_2 "\"$runs/labelled_seed102\", \"$runs/pleasing_seed104\"" \
    --set train_reward.epochs=1 --set "model.path=$runs/reward_model"
.venv/bin/agent-r1 table "$example/unlabelled_second.toml"
.venv/bin/agent-r1 table "$example/unlabelled_hybrid.toml"
exec .venv/bin/python "$example/unlabelled.py"
