#!/bin/sh
# Train on questions whose answers are hidden, with a reward model that other questions have taught,
# and compare with training on the answers. From the repository root. What is finished is kept: start
# it again to continue.
set -eu
example=examples/deep_world
labelled=runs/deep_world/labelled
if [ ! -d "$labelled" ]; then
    .venv/bin/agent-r1 train "$example/run.toml" --run-dir "$labelled" --set run.seed=100 \
        --set learner.trajectories_per_step=64 --set 'diagnose.sets=["development"]' \
        --set "evaluation.sets={development = \"$example/data/eval_development.jsonl\"}"
elif [ ! -f "$labelled/summary.json" ]; then
    .venv/bin/agent-r1 train --resume "$labelled"
fi
.venv/bin/agent-r1 table "$example/unlabelled_true.toml"
if [ ! -d runs/deep_world/reward_model ]; then
    .venv/bin/agent-r1 train-reward "$example/reward_model.toml" \
        --set train_reward.trajectories="[\"$labelled\"]" \
        --set 'train_reward.test_trajectories=["runs/table/unlabelled_true/runs/true_labels_seed0"]' \
        --set train_reward.output=runs/deep_world/reward_model
fi
.venv/bin/agent-r1 table "$example/unlabelled_learned.toml"
.venv/bin/agent-r1 table "$example/unlabelled_hybrid.toml"
exec .venv/bin/python "$example/unlabelled.py"
