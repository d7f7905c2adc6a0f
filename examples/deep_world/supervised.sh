#!/bin/sh
# Train the models that supervised.toml compares, from the repository root: nine runs of sft.toml.
set -eu
example=examples/deep_world
.venv/bin/python "$example/right_runs.py" --data "$example/data"
for percentage in 1 10 100; do
    for seed in 0 1 2; do
        .venv/bin/agent-r1 sft "$example/sft.toml" --set run.seed="$seed" \
            --set sft.data="[\"$example/data/right_$percentage.jsonl\"]" \
            --set sft.output="runs/deep_world/sft_${percentage}_seed$seed"
    done
done
