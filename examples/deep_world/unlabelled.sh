#!/bin/sh
# Train on questions whose answers are hidden, with a reward model that other questions have taught,
# and compare with training on the answers. From the repository root. What is finished is kept: start
# it again to continue.
set -eu
example=examples/deep_world
runs=runs/deep_world
labelled=
for seed in 100 101 102 103; do
    run=$runs/labelled_seed$seed
    labelled="$labelled${labelled:+, }\"$run\""
    if [ ! -d "$run" ]; then
        .venv/bin/agent-r1 train "$example/run.toml" --run-dir "$run" --set "run.seed=$seed" \
            --set learner.trajectories_per_step=64 --set 'diagnose.sets=["development"]' \
            --set 'evaluation.sets={}' \
            --set "evaluation.sets.development=\"$example/data/eval_development.jsonl\""
    elif [ ! -f "$run/summary.json" ]; then
        .venv/bin/agent-r1 train --resume "$run"
    fi
done
.venv/bin/agent-r1 table "$example/unlabelled_true.toml"
if [ ! -d "$runs/reward_model" ]; then
    # The settings were chosen on tasks of the labelled runs that were held out (README.md).
    .venv/bin/agent-r1 train-reward "$example/reward_model.toml" \
        --set "train_reward.trajectories=[$labelled]" \
        --set 'train_reward.test_trajectories=["runs/table/unlabelled_true/runs/true_labels_seed0"]' \
        --set train_reward.turns=last --set train_reward.epochs=2 --set train_reward.ranks=2 \
        --set train_reward.lr_schedule=linear --set train_reward.min_lr_ratio=0.1 \
        --set "train_reward.output=$runs/reward_model"
fi
.venv/bin/agent-r1 table "$example/unlabelled_learned.toml"
.venv/bin/agent-r1 table "$example/unlabelled_hybrid.toml"
exec .venv/bin/python "$example/unlabelled.py"
