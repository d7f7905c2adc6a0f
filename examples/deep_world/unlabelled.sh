#!/bin/sh
# Train on questions whose answers are hidden, with a reward model that other questions have taught,
# and compare with training on the answers. From the repository root. What is finished is kept: start
# it again to continue.
set -eu
example=examples/deep_world
runs=runs/deep_world

train() { # train NAME SEED [OPTION]...: a run whose trajectories are kept; it looks at no reported set
    run=$runs/$1 seed=$2
    shift 2
    # --resume of a finished run ends at once. Status 3: it is finished, with losses that were named.
    if [ -f "$run/config.json" ]; then
        .venv/bin/agent-r1 train --resume "$run" || [ $? -eq 3 ]
    else
        .venv/bin/agent-r1 train "$example/run.toml" --run-dir "$run" --set "run.seed=$seed" \
            --set learner.trajectories_per_step=64 --set evaluation.every=0 --set evaluation.after=false \
            --set 'diagnose.sets=["development"]' --set 'evaluation.sets={}' \
            --set "evaluation.sets.development=\"$example/data/eval_development.jsonl\"" "$@" || [ $? -eq 3 ]
    fi
}

labelled=
for seed in 100 101 102; do
    train "labelled_seed$seed" "$seed"
    labelled="$labelled${labelled:+, }\"$run\""
done

# The reward model is judged by what an agent does about other people.
train judged_seed103 103 --set "data.train=[\"$example/data/unlabelled.jsonl\"]"
if [ ! -d "$runs/reward_model" ]; then
    .venv/bin/agent-r1 train-reward "$example/reward_model.toml" \
        --set "train_reward.trajectories=[$labelled]" \
        --set "train_reward.test_trajectories=[\"$run\"]" \
        --set train_reward.turns=last --set train_reward.epochs=2 \
        --set train_reward.engine.lr_schedule=linear --set train_reward.engine.min_lr_ratio=0.1 \
        --set train_reward.engine.ranks=2 --set "train_reward.output=$runs/reward_model"
fi

.venv/bin/agent-r1 table "$example/unlabelled_true.toml"
.venv/bin/agent-r1 table "$example/unlabelled_learned.toml"
.venv/bin/agent-r1 table "$example/unlabelled_hybrid.toml"
exec .venv/bin/python "$example/unlabelled.py"
